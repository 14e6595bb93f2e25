"""Which kernel suits the device that a trace is for."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax

HOPPER = 9  # the major compute capability


def kernel_of_this_platform() -> str | None:
    """ "cpu", "tpu", "gpu" (Hopper), or None where there is no kernel: on GPUs of other kinds, said once."""
    device = device_of_this_trace()
    is_gpu_here = isinstance(device, jax.Device) and device.platform == "gpu"
    if is_gpu_here and not _is_hopper(str(getattr(device, "compute_capability", ""))):
        _say_no_kernel(device.device_kind)
        return None
    return device.platform if device.platform in ("cpu", "tpu", "gpu") else None


def device_of_this_trace() -> Any:
    """A jax.Device, or the AbstractDevice that is set where a program is compiled for another machine."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:  # of a mesh: of devices that are here, or of some that are not
        return next((device for device in jax.devices() if device.device_kind == abstract.device_kind), abstract)
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.devices(chosen)[0] if chosen else jax.devices()[0]


def _is_hopper(compute_capability: str) -> bool:
    return compute_capability.split(".")[0] == str(HOPPER)


@functools.cache
def _say_no_kernel(kind: str) -> None:
    warnings.warn(
        f'paged_attention has a GPU kernel for NVIDIA Hopper only; on {kind} implementation=None takes "xla"',
        stacklevel=2,
    )
