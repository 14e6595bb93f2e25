"""Which Pallas kernel suits the device that a trace is for."""

from __future__ import annotations

import functools
import warnings

import jax

HOPPER = 9  # the major compute capability


def kernel_of_this_platform() -> str | None:
    """ "tpu", "gpu" (Hopper), or None where there is no kernel: CPUs, and GPUs of other kinds, said once."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device  # set where a program is compiled for another machine
    if abstract is not None:
        platform, kind = abstract.platform, abstract.device_kind
    else:
        device = _default_device()
        platform, kind = device.platform, device.device_kind
        if platform == "gpu" and not _is_hopper(str(getattr(device, "compute_capability", ""))):
            _say_no_kernel(kind)
            return None
    return platform if platform in ("tpu", "gpu") else None


def _default_device() -> jax.Device:
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
