"""pagedjax.prefix_cache and the keys of pagedjax.block: what is found, what is not, and what goes first."""

from __future__ import annotations

import pytest

from pagedjax import block as block_module
from pagedjax.block import Block, BlockKey
from pagedjax.prefix_cache import PrefixCache

ROOT = BlockKey.root(0, None)


def chain(*blocks: tuple[int, ...], root: bytes = ROOT) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for tokens in blocks:
        keys.append(BlockKey.after(keys[-1].digest if keys else root, tokens))
    return keys


def publish(cache: PrefixCache, keys: list[BlockKey], first_id: int = 1) -> list[Block]:
    """Blocks with these keys that a row holds."""
    blocks = [Block(num_rows=1, block_id=first_id + index) for index in range(len(keys))]
    assert all(cache.publish(key, block) for key, block in zip(keys, blocks, strict=True))
    return blocks


def let_go(cache: PrefixCache, blocks: list[Block]) -> None:
    """The row gives them back, the last one first."""
    for block in reversed(blocks):
        block.num_rows -= 1
        cache.rest(block)


def test_a_key_is_the_weights_the_salt_and_all_tokens_so_far() -> None:
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))
    same_block = [
        chain((1, 2), (3, 4))[1],
        chain((3, 4))[0],  # at another place
        chain((2, 1), (3, 4))[1],  # behind other tokens
        chain((1, 2), (3, 4), root=BlockKey.root(1, None))[1],
        *(chain((1, 2), (3, 4), root=BlockKey.root(0, salt))[1] for salt in ("", "a", "None", "0, None")),
    ]
    assert len(set(same_block)) == len(same_block)
    assert len({key.digest for key in same_block}) == len(same_block)


def test_roots_differ() -> None:
    roots = [BlockKey.root(version, salt) for version in (0, 1, 10) for salt in (None, "", "0", "1", "', '", "None")]
    assert len(set(roots)) == len(roots)


def test_tokens_of_any_size_make_a_key() -> None:
    keys = [chain((token, 2**40))[0] for token in (0, 1, 2**31, 2**32, 2**32 + 1)]
    assert len(set(keys)) == len(keys)


def test_the_leading_published_blocks_are_found() -> None:
    cache, keys = PrefixCache(), chain((1, 2), (3, 4), (5, 6))
    blocks = publish(cache, keys)
    assert cache.match(keys) == blocks
    assert cache.match(chain((1, 2), (3, 4), (5, 7))) == blocks[:2]
    assert cache.match(chain((1, 2), (9, 4), (5, 6))) == blocks[:1]
    assert cache.match(chain((3, 4), (5, 6))) == []
    assert cache.match([]) == []
    assert [block.key for block in blocks] == keys


def test_a_hit_ends_at_the_first_block_that_is_missing() -> None:
    cache, keys = PrefixCache(), chain((1, 2), (3, 4), (5, 6))
    publish(cache, keys[:1])
    publish(cache, keys[2:], first_id=3)
    assert len(cache.match(keys)) == 1


def test_digests_that_collide_do_not_make_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_module, "_digest", lambda *parts: b"the same for all")
    cache, keys = PrefixCache(), chain((1, 2), (3, 4))
    assert keys[0].digest == keys[1].digest == BlockKey.root(7, "x")
    publish(cache, keys)
    assert cache.match(chain((1, 3), (3, 4))) == []
    assert len(cache.match(chain((1, 2), (3, 5)))) == 1
    assert len(cache.match(keys)) == 2


def test_keys_differ_from_other_things() -> None:
    assert chain((1, 2))[0] != (1, 2)
    assert chain((1, 2))[0] != ROOT


def test_content_is_published_once() -> None:
    cache, keys = PrefixCache(), chain((1, 2))
    (first,) = publish(cache, keys)
    second = Block(num_rows=1, block_id=9)
    assert not cache.publish(keys[0], second)
    assert second.key is None
    assert cache.match(keys) == [first]
    assert cache.block_ids == [1]


def test_only_blocks_without_rows_are_idle() -> None:
    cache = PrefixCache()
    blocks = publish(cache, chain((1, 2), (3, 4)))
    assert cache.num_idle == 0
    let_go(cache, blocks)
    assert cache.num_idle == 2
    cache.wake(blocks[0])
    assert cache.num_idle == 1
    orphan = Block(num_rows=0, block_id=7)  # a window passed it in the step that filled it
    assert cache.publish(chain((5, 6))[0], orphan)
    assert cache.num_idle == 2


def test_the_block_used_longest_ago_goes_first_and_of_a_sequence_the_last() -> None:
    cache, a, b = PrefixCache(), chain((1, 2), (3, 4), (5, 6)), chain((7, 8), (9, 9))
    blocks_a, blocks_b = publish(cache, a), publish(cache, b, first_id=11)
    let_go(cache, blocks_a)
    let_go(cache, blocks_b)
    assert cache.evict() == 3
    cache.wake(blocks_a[0])  # used again, and given back later than all others
    blocks_a[0].num_rows += 1
    let_go(cache, blocks_a[:1])
    assert [cache.evict() for _ in range(4)] == [2, 12, 11, 1]
    assert cache.num_idle == 0
    assert not any(key in cache for key in a + b)
    with pytest.raises(KeyError):
        cache.evict()


def test_an_evicted_block_can_be_published_anew() -> None:
    cache, keys = PrefixCache(), chain((1, 2))
    blocks = publish(cache, keys)
    let_go(cache, blocks)
    cache.evict()
    assert blocks[0].key is None
    again = publish(cache, keys, first_id=5)
    assert cache.match(keys) == again


def test_clear_forgets_blocks_in_use_too() -> None:
    cache, keys = PrefixCache(), chain((1, 2), (3, 4), (5, 6))
    blocks = publish(cache, keys)
    let_go(cache, blocks[2:])
    assert sorted(cache.clear()) == [1, 2, 3]
    assert (cache.num_idle, cache.block_ids, cache.match(keys)) == (0, [], [])
    assert [(block.key, block.num_rows) for block in blocks] == [(None, 1), (None, 1), (None, 0)]
    assert cache.clear() == []
