"""What dsjax finds on this machine (versions, devices, tools, settings), and what is wrong with it.

JAX is imported when it is looked at, so that the advice can be had without it.
"""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import dsjax
from dsjax.engine.options import EngineOptions, executables_folder

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
CUDA_PREFIXES = ("jax-cuda", "nvidia-")
TOOLS = ("ptxas", "nvlink")
VARIABLES = ("DSJAX_", "JAX_", "XLA_", "CUDA_", "NCCL_", "TF_GPU_", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
KERNEL_CACHES = ("all", "xla_gpu_kernel_cache_file")  # settings of JAX's cache that make XLA call nvlink
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}  # NVIDIA, "CUDA Toolkit Release Notes", minor version compatibility
MUCH_MEMORY_MIB = 1024


class Problem(NamedTuple):
    """Something that is wrong, and what to do about it."""

    what: str
    advice: str


@dataclass(frozen=True)
class Environment:
    """The facts. `gpus`: what the NVIDIA driver lists, before JAX takes memory. `devices`: what JAX may use.

    `kernels`: per operation what runs on `target`. `tools`: path, or None where there is none.
    `executables`: folder, number of entries, bytes, and whether it can be written to.
    """

    versions: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    jax_error: str | None = None
    target: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str | None] = field(default_factory=dict)
    executables: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def plugins(self) -> dict[str, str]:
        """JAX's CUDA plugins: "cuda12" or "cuda13" -> version."""
        names = {f"jax-{kind}-plugin": kind for kind in OLDEST_DRIVER}
        return {names[name]: version for name, version in self.versions.items() if name in names}

    @property
    def has_gpu(self) -> bool:
        """Whether JAX sees a GPU."""
        return any(device["platform"] == "gpu" for device in self.devices)


def look_around(options: EngineOptions) -> Environment:
    """The facts of this process and machine, for engines with `options`. Starts JAX."""
    gpus = _nvidia_gpus()  # before JAX takes memory
    devices, error = _devices()
    target = devices[0]["target"] if devices else None
    return Environment(
        versions=_versions(),
        driver=next((gpu["driver"] for gpu in gpus if gpu["driver"]), None),
        gpus=gpus,
        devices=devices,
        jax_error=error,
        target=target,
        kernels=_kernels(target) if target else {},
        tools={name: _tool(name) for name in TOOLS},
        executables=_executables(executables_folder(options)),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def problems(env: Environment) -> list[Problem]:
    """What is wrong with `env`, the worst first."""
    return [*_device_problems(env), *_version_problems(env), *_tool_problems(env), *_cache_problems(env)]


def _device_problems(env: Environment) -> list[Problem]:
    found = []
    hidden = "cpu" in env.variables.get("JAX_PLATFORMS", "").split(",")
    if env.jax_error is not None:
        advice = "Check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES; JAX_PLATFORMS=cpu runs on the CPU."
        found.append(Problem(f"JAX finds no device: {env.jax_error}", advice))
    elif env.gpus and not env.has_gpu:
        what = f"JAX does not use the {len(env.gpus)} NVIDIA GPU(s) of this machine."
        if hidden:
            advice = "JAX_PLATFORMS hides them: unset it."
        elif not env.plugins:
            advice = "Install JAX's CUDA plugin: pip install 'dsjax[cuda13]' (or cuda12, for drivers before 580)."
        else:
            advice = "See what stops the plugin: JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'."
        found.append(Problem(what, advice))
    for gpu in env.gpus:
        if (gpu["used_mib"] or 0) > MUCH_MEMORY_MIB:
            what = f"{gpu['name']}: other processes use {gpu['used_mib']} of {gpu['total_mib']} MiB."
            found.append(Problem(what, "End them (nvidia-smi lists them), or lower --gpu-memory-fraction."))
    return found


def _version_problems(env: Environment) -> list[Problem]:
    found, driver = [], env.driver or ""
    jaxlib = env.versions.get("jaxlib")
    for kind, version in env.plugins.items():
        oldest = OLDEST_DRIVER[kind]
        if version != jaxlib:
            what = f"The {kind} plugin is version {version}, but jaxlib is {jaxlib}."
            found.append(Problem(what, f"Install them together: pip install 'jax[{kind}]=={jaxlib}'."))
        if driver and int(driver.partition(".")[0]) < oldest:
            what = f"The NVIDIA driver is {driver}, but CUDA {kind.removeprefix('cuda')} needs {oldest} or newer."
            found.append(Problem(what, "Update the driver, or install an older CUDA: pip install 'dsjax[cuda12]'."))
    if len(env.plugins) > 1:
        what = f"Several CUDA plugins are installed: {', '.join(env.plugins)}."
        found.append(Problem(what, "Keep one: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt."))
    if "cuda" in env.variables.get("LD_LIBRARY_PATH", "") and any(n.startswith("nvidia-") for n in env.versions):
        what = "LD_LIBRARY_PATH names CUDA libraries, which replace those that were installed for JAX."
        found.append(Problem(what, "Unset it, unless JAX was installed to use them (cuda13-local)."))
    return found


def _tool_problems(env: Environment) -> list[Problem]:
    found = []
    if env.has_gpu and env.tools.get("ptxas") is None:
        what = "There is no ptxas, which XLA needs to compile kernels."
        found.append(Problem(what, "pip install 'nvidia-cuda-nvcc==13.*', or put a CUDA toolkit's bin on PATH."))
    caches = env.variables.get("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "")
    if env.has_gpu and env.tools.get("nvlink") is None and any(name in caches.split(",") for name in KERNEL_CACHES):
        what = f"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES={caches} needs nvlink, which CUDA from pip does not bring."
        found.append(Problem(what, "Unset the variable (jax issue 28247), or put a CUDA toolkit's bin on PATH."))
    return found


def _cache_problems(env: Environment) -> list[Problem]:
    found = []
    if not env.executables.get("writable", True):
        what = f"{env.executables['folder']} cannot be written to, so every start compiles anew."
        found.append(Problem(what, "Choose another folder with --cache-dir or DSJAX_CACHE_DIR."))
    if env.variables.get("JAX_ENABLE_COMPILATION_CACHE", "true").lower() in ("0", "false", "no", "off"):
        what = "JAX_ENABLE_COMPILATION_CACHE is off, so every start compiles anew."
        found.append(Problem(what, "Unset it."))
    return found


def _versions() -> dict[str, str]:
    headers = [dist.metadata for dist in metadata.distributions()]
    installed = {  # damaged metadata may lack either
        name.lower(): header.get("Version") or "unknown" for header in headers if (name := header.get("Name"))
    }
    cuda = sorted(name for name in installed if name.startswith(CUDA_PREFIXES))
    named = {name: installed[name] for name in (*PACKAGES, *cuda) if name in installed}
    return {"dsjax": dsjax.__version__, "python": platform.python_version()} | named


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """What JAX may use, or why there is nothing."""
    import jax

    from dsjax.aot.targets import target_of

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [], str(error)
    return [
        {
            "id": device.id,
            "kind": device.device_kind,
            "platform": device.platform,
            "target": target_of(device),
            "compute_capability": getattr(device, "compute_capability", None),
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in devices
    ], None


def _nvidia_gpus() -> list[dict[str, Any]]:
    """What nvidia-smi lists; nothing without it. What the driver does not tell is None."""
    fields = "name,memory.total,memory.used,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [_nvidia_gpu(line) for line in done.stdout.splitlines() if line.strip()]


def _nvidia_gpu(line: str) -> dict[str, Any]:
    """A line of nvidia-smi's table; instead of a value it may have "[N/A]", instead of a row a message."""
    name, *values = [cell.strip() for cell in line.rsplit(",", 3)]
    total, used, driver = values if len(values) == 3 else ("", "", "")
    return {
        "name": name,
        "total_mib": int(total) if total.isdecimal() else None,
        "used_mib": int(used) if used.isdecimal() else None,
        "driver": driver if driver[:1].isdecimal() else None,
    }


def _kernels(target: str) -> dict[str, str]:
    """Per operation what runs on `target`: the reference, or a kernel for the models that it serves."""
    from dsjax.pallas_kernels import implementations, served_models

    served = {name: f"{target} for {models}, else reference" for name, models in served_models(target).items()}
    return implementations(target) | served


def _tool(name: str) -> str | None:
    """Where XLA finds a tool of CUDA: on PATH, in NVIDIA's packages, in the usual folder."""
    spec = find_spec("nvidia")
    roots = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    folders = [str(root / part / "bin") for root in roots for part in ("cu13", "cuda_nvcc")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders, "/usr/local/cuda/bin"])
    return shutil.which(name, path=path)


def _executables(folder: Path) -> dict[str, Any]:
    from dsjax.aot.compile import kept_executables

    entries, size_bytes = kept_executables(folder)
    places = (folder, *folder.absolute().parents)
    nearest = next(place for place in places if os.path.exists(place))  # unlike Path.exists: False without access
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return {"folder": str(folder), "entries": entries, "bytes": size_bytes, "writable": writable}
