"""A running engine as a value: its requests and what they have so far, to go on with in another process.

Nothing in it belongs to a process: times are ages, text is made again from the tokens, and blocks have new places.
`folder` writes it to disk.
"""

from pagedjax.snapshot.snapshot import Snapshot, restore, take

__all__ = ["Snapshot", "restore", "take"]
