"""One file per subcommand, each with a `command` function; thin: parse, plan, run, report."""

ORDER = ("build", "inspect", "lookup", "dump", "search", "mask", "draft", "bench", "info")
"""The order in `flashtrie --help`; others follow by name."""
