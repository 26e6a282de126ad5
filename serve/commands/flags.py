"""The flags that commands share: parameters that are EngineOptions or SamplingParams become one flag per option.

A new option needs its field there and its line here.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from dsjax.engine.options import DTYPES, LOAD_FORMATS, PLANS, EngineOptions
from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import OptionError

Model = Annotated[str, typer.Argument(help="A checkpoint folder, a model in the Hugging Face cache, or 'demo'.")]


def parse_buckets(text: str) -> tuple[int, ...]:
    """Buckets from text such as 16,64,256."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of integers such as 16,64,256.") from None


ENGINE_FLAGS: dict[str, Any] = {
    "max_model_len": Annotated[
        int | None, typer.Option("--max-model-len", "--context-length", help="Context in tokens.")
    ],
    "max_batched_tokens": Annotated[int | None, typer.Option(help="Most tokens in one step.")],
    "token_buckets": Annotated[
        tuple | None, typer.Option(parser=parse_buckets, metavar="N,N,...", help="Token buckets, smallest first.")
    ],
    "max_num_seqs": Annotated[int | None, typer.Option(help="Most requests that run at once.")],
    "row_buckets": Annotated[
        tuple | None,
        typer.Option(parser=parse_buckets, metavar="N,N,...", help="Buckets of requests, for steps that only decode."),
    ],
    "plan": Annotated[
        str, typer.Option(metavar="|".join(PLANS), help="How much goes into one executable; auto: step.")
    ],
    "load_format": Annotated[str, typer.Option(metavar="|".join(LOAD_FORMATS), help="dummy: random weights.")],
    "dtype": Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Number format of the model.")],
    "tp": Annotated[int, typer.Option(help="Devices to split the model over.")],
    "kv_tokens": Annotated[int | None, typer.Option(help="Size of the cache in tokens.")],
    "gpu_memory_fraction": Annotated[float, typer.Option(help="Share of the GPU's memory to use.")],
    "cache_dir": Annotated[str | None, typer.Option(help="Folder for compiled executables.")],
    "prefix_cache": Annotated[bool, typer.Option(help="Share the cache of equal beginnings between requests.")],
    "deterministic": Annotated[
        bool, typer.Option("--deterministic", help="Make each answer independent of what else runs; slower.")
    ],
}

SAMPLING_FLAGS: dict[str, Any] = {
    "temperature": Annotated[float, typer.Option(help="0 takes the likeliest token.")],
    "top_k": Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")],
    "top_p": Annotated[float, typer.Option(help="Sample from the fewest tokens with this probability in all.")],
    "min_p": Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")],
    "presence_penalty": Annotated[float, typer.Option(help="Against tokens that the answer has, once each.")],
    "frequency_penalty": Annotated[float, typer.Option(help="The same, once per occurrence.")],
    "repetition_penalty": Annotated[float, typer.Option(help="Against tokens of prompt and answer; 1: none.")],
    "max_tokens": Annotated[int | None, typer.Option(help="Longest answer in tokens.")],
    "seed": Annotated[int | None, typer.Option(help="For the same answer again.")],
    "ignore_eos": Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")],
}

FLAGS: dict[type, dict[str, Any]] = {EngineOptions: ENGINE_FLAGS, SamplingParams: SAMPLING_FLAGS}


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the flags of FLAGS in the place of each parameter of such a type.

    The parameter's default, if it has one, gives the defaults of the flags.
    """
    signature = inspect.signature(command)
    groups = {name: p for name, p in signature.parameters.items() if p.annotation in FLAGS}
    own = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name not in groups]
    flags = [flag for parameter in groups.values() for flag in _flags_of(parameter)]

    @wraps(command)
    def run(**values: Any) -> Any:
        for name, parameter in groups.items():
            given = {flag: values.pop(flag) for flag in FLAGS[parameter.annotation]}
            values[name] = parameter.annotation(**given)
        return command(**values)

    parameters = [*own, *flags]
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def option_from_text(name: str, text: str) -> dict[str, Any]:
    """An engine option as a keyword, from its flag's name and a value such as "16,64", "true" or "none".

    Raises OptionError.
    """
    option = name.replace("-", "_")
    if option not in ENGINE_FLAGS:
        raise OptionError(f"Unknown option {name!r}; the options are {', '.join(ENGINE_FLAGS)}.")
    kind = get_args(ENGINE_FLAGS[option])[0]
    kinds = get_args(kind) or (kind,)
    if text == "none" and NoneType in kinds:
        return {option: None}
    try:
        return {option: _FROM_TEXT[kinds[0]](text)}
    except (ValueError, KeyError, typer.BadParameter):
        raise OptionError(f"{name} is {text!r}, expected a value like that of its flag (dsjax serve --help).") from None


_FROM_TEXT: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    tuple: parse_buckets,
    bool: {"true": True, "false": False}.__getitem__,
}


def _flags_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """One keyword per flag of the parameter's type."""
    kind = parameter.annotation
    defaults = kind() if parameter.default is parameter.empty else parameter.default

    def flag(name: str, annotation: Any) -> inspect.Parameter:
        default = getattr(defaults, name)
        if isinstance(default, tuple):  # defaults are parsed like what is typed
            default = ",".join(map(str, default))
        return inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    return [flag(name, annotation) for name, annotation in FLAGS[kind].items()]
