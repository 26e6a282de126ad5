"""The subcommands of `dsjax`, one module each, and the flags that they share."""
