"""`dsjax env`: what dsjax finds on this machine, and what is wrong with it."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dsjax.engine.options import EngineOptions


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: Annotated[str | None, typer.Option(help="Folder for compiled executables.")] = None,
) -> None:
    """Show versions, devices, kernels, tools and settings, and what to do about problems."""
    from dsjax.environment import look_around, problems

    found = look_around(EngineOptions(cache_dir=cache_dir))
    wrong = problems(found)
    facts = asdict(found) | {"problems": [problem._asdict() for problem in wrong]}
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


def _lines(facts: dict[str, Any]) -> list[str]:
    kept = facts["executables"]
    sections = {
        "versions": _pairs(facts["versions"]),
        "driver": [facts["driver"] or "no NVIDIA driver"],
        "devices": [_device(device) for device in facts["devices"]] or ["none"],
        "target": [facts["target"] or "none"],
        "kernels": _pairs(facts["kernels"]),
        "tools": _pairs({name: path or "not found" for name, path in facts["tools"].items()}),
        "executables": [f"{kept['folder']}: {kept['entries']} executables, {kept['bytes'] / 1e6:.1f} MB"],
        "variables": _pairs(facts["variables"]) or ["none that matter"],
        "problems": [f"{problem['what']}\n    {problem['advice']}" for problem in facts["problems"]] or ["none"],
    }
    return [line for title, lines in sections.items() for line in (title, *(f"  {text}" for text in lines))]


def _pairs(values: dict[str, str]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{name:{width}}  {value}" for name, value in values.items()]


def _device(device: dict[str, Any]) -> str:
    parts = [f"{device['id']}: {device['kind']} ({device['platform']})"]
    if device["compute_capability"]:
        parts.append(f"compute capability {device['compute_capability']}")
    if device["memory_bytes"]:
        parts.append(f"{device['memory_bytes'] / 1e9:.1f} GB for JAX")
    return ", ".join(parts)
