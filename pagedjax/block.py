"""A block of the pool as the host knows it: who holds it and what; where it lies only once it is full.

The device owns ids and counts. The host keeps one `Block` for each block that rows or the prefix cache hold, so that it
can tell which blocks a release gives back and whether an append will copy; it learns an id only once a block is full.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

NULL_BLOCK = 0  # stands for a block that a window has passed


@dataclasses.dataclass(frozen=True, eq=False)
class BlockKey:
    """What a full block holds: its tokens, and the key of everything before it.

    The digest covers the weights, the salt and every token up to the block's end. Keys are equal only if their own
    tokens are equal too, so that looking one up verifies them.
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]

    @staticmethod
    def root(weights_version: int, cache_salt: str | None) -> bytes:
        """The parent of a sequence's first block."""
        return _digest(b"root", repr((weights_version, cache_salt)).encode())

    @classmethod
    def after(cls, parent: bytes, token_ids: Sequence[int]) -> BlockKey:
        """The key of a block with these tokens behind the one whose digest is `parent`."""
        return cls(_digest(parent, np.asarray(token_ids, np.int64).tobytes()), parent, tuple(token_ids))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        return (self.digest, self.parent, self.token_ids) == (other.digest, other.parent, other.token_ids)


@dataclasses.dataclass(eq=False)
class Block:
    """One block.

    Attributes:
        num_rows: rows that hold it.
        block_id: where it lies; None until it is full and the device has said so.
        key: what it holds while the prefix cache has a reference to it, else None.
    """

    num_rows: int = 0
    block_id: int | None = None
    key: BlockKey | None = None

    @property
    def known_id(self) -> int:
        """The id of a block that is known to be full."""
        assert self.block_id is not None
        return self.block_id


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()
