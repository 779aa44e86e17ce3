"""Exit codes of `baton loadtest`, other than 0 and the code for wrong options."""

EXIT_NOTHING_CAME = 1
EXIT_LAGGED = 3
EXIT_STOPPED = 130
