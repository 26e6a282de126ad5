"""The dsjax server: command line, HTTP API, and the process that runs the engine."""
