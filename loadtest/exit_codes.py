"""Exit codes of the load test, besides 0 and the code for wrong options."""

EXIT_NOTHING_CAME = 1
EXIT_LAGGED = 3
EXIT_STOPPED = 130
