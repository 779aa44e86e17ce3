"""Exit codes of the load test, besides 0 and those of options that make no sense."""

EXIT_NOTHING_CAME = 1
EXIT_LAGGED = 3
EXIT_STOPPED = 130
