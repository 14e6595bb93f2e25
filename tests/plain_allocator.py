"""A block allocator in plain Python, which knows nothing of ids, stacks or counts.

A row is a list of block objects and a list of tokens; a holder is an appearance in a row or among the retained.
"""

import dataclasses

NUM_ROWS, MAX_BLOCKS, NUM_BLOCKS = 4, 5, 18
LOST = -1  # what the null block's slots hold: a token a sliding window gave back reads as this


@dataclasses.dataclass(eq=False)
class Block:
    """A block of the model: the tokens written to it, by slot."""

    tokens: dict[int, int] = dataclasses.field(default_factory=dict)


class Row:
    """A row of the model; `blocks` has None where a window gave a block back."""

    def __init__(self, blocks: list[Block | None] = (), tokens: list[int] = ()) -> None:  # type: ignore[assignment]
        self.blocks, self.tokens = list(blocks), list(tokens)


class Model:
    """The allocator, without ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows = [Row() for _ in range(NUM_ROWS)]
        self.retained: list[Block] = []

    def holders(self, block: Block) -> int:
        return sum(held is block for row in self.rows for held in row.blocks) + sum(b is block for b in self.retained)

    def live(self) -> list[Block]:
        blocks = [block for row in self.rows for block in row.blocks if block is not None] + self.retained
        return list(dict.fromkeys(blocks))

    def num_free(self) -> int:
        return NUM_BLOCKS - 1 - len(self.live())

    def writes_tail(self, row: int, new: int) -> bool:
        return new > 0 and len(self.rows[row].tokens) % self.block_size > 0

    def copiers(self, news: list[int]) -> tuple[list[int], list[list[int]]]:
        """Rows that certainly copy their tail, and groups of rows of which all but one do."""
        sure, groups = [], []
        writers: dict[Block, list[int]] = {}
        for row, new in enumerate(news):
            if self.writes_tail(row, new):
                tail = self.rows[row].blocks[-1]
                if tail is None:
                    sure.append(row)
                else:
                    writers.setdefault(tail, []).append(row)
        for tail, rows in writers.items():
            if self.holders(tail) > len(rows):
                sure += rows
            elif len(rows) > 1:
                groups.append(rows)
        return sure, groups

    def needed(self, news: list[int]) -> int | None:
        """Free blocks an append takes; None where a row cannot grow so."""
        sure, groups = self.copiers(news)
        need = len(sure) + sum(len(rows) - 1 for rows in groups)
        for row, new in zip(self.rows, news, strict=True):
            length = len(row.tokens) + new
            if new < 0 or length > MAX_BLOCKS * self.block_size:
                return None
            need += -(-length // self.block_size) - len(row.blocks)
        return need

    def append(self, row: int, tokens: list[int], copies_tail: bool) -> None:
        target = self.rows[row]
        if copies_tail:
            tail = target.blocks[-1]
            kept = dict(tail.tokens) if tail else dict.fromkeys(range(self.block_size), LOST)
            target.blocks[-1] = Block(kept)
        for token in tokens:
            slot = len(target.tokens) % self.block_size
            if slot == 0:
                target.blocks.append(Block())
            block = target.blocks[-1]
            assert block is not None
            block.tokens[slot] = token
            target.tokens.append(token)

    def cut(self, row: int, length: int) -> None:
        target = self.rows[row]
        del target.tokens[max(length, 0) :]
        del target.blocks[-(-len(target.tokens) // self.block_size) :]

    def slide(self, window: int) -> None:
        for row in self.rows:
            for nth in range(len(row.blocks)):
                end = (nth + 1) * self.block_size
                if 0 < window <= len(row.tokens) - end:  # all its keys are left of len - window
                    row.blocks[nth] = None
                    row.tokens[end - self.block_size : end] = [LOST] * self.block_size

    def fork(self, parents: list[int]) -> None:
        old = [Row(row.blocks, row.tokens) for row in self.rows]
        for row, parent in enumerate(parents):
            if 0 <= parent < NUM_ROWS:
                self.rows[row] = Row(old[parent].blocks, old[parent].tokens)

    def adopt(self, row: int, blocks: list[Block | None], length: int) -> None:
        slots = [block.tokens.get(slot) if block else LOST for block in blocks for slot in range(self.block_size)]
        self.rows[row] = Row(blocks, slots[:length])  # type: ignore[arg-type]
