"""Kernels for CPUs: loops that numba compiles, called through XLA's foreign function interface, on XLA's threads.

XLA gathers keys before it attends, and packs weights before it multiplies, at every step; these read both where they
lie. Imported only where a program is traced for a CPU.
"""

from pallas_kernels._cpu.attention import attend, why_not
from pallas_kernels._cpu.product import can_multiply, multiply

__all__ = ["attend", "can_multiply", "multiply", "why_not"]
