"""Errors that dsjax raises for bad input. Each message says what is wrong, where, and what to do."""


class DsjaxError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(DsjaxError):
    """A model configuration (config.json) that is unknown, incomplete or contradicts itself."""


class CheckpointError(DsjaxError):
    """A model path, weight file or tokenizer that is missing, damaged or does not fit the configuration."""


class OptionError(DsjaxError):
    """An engine option or command-line flag with a value that cannot work."""


class RequestError(DsjaxError):
    """A request that can never be served as it stands. `param` names the offending request field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ConcurrentUseError(DsjaxError):
    """A call of an LLM that is at work in another thread."""


class EngineDeadError(DsjaxError):
    """The engine stopped after a failure and cannot serve requests until it is started again."""
