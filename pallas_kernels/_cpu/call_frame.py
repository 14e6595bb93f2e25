"""XLA's foreign function interface as numba sees it: a kernel's buffers, and its items divided over XLA's threads.

XLA calls a handler with the address of a call frame (`xla/ffi/api/c_api.h`, which jaxlib ships; the layout is a stable
ABI). It is read here as words of 64 bits, whose places have names below. A kernel is a function of that frame, the
number of an item of its work, and how many items there are; the handler gives the items to the threads of XLA's own
pool and to the one that called, whichever comes first.

What the threads share, `_Shared` below, is freed by the last that leaves it: a task may start long after all work is
done, and then finds none. So nobody waits for a thread that may not come; the caller waits for items already begun.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import threading
import types as python_types
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding
from llvmlite import ir
from numba import carray, cfunc, extending, njit, types
from numba.core import cgutils

intrinsic: Any = extending.intrinsic  # its own type knows neither arguments nor result

WORD = ir.IntType(64)

# Places in the words of XLA_FFI_CallFrame, and of what its pointers lead to.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RESULTS = 1, 2, 3, 9, 14
BUFFER_DATA, BUFFER_RANK, BUFFER_DIMS = 3, 4, 5
EXTENSION_TYPE, EXTENSION_METADATA = 1, 3  # the type is the lower half of its word
METADATA_VERSION, METADATA_TRAITS = 3, 4
API_DESTROY_ERROR, API_SCHEDULE, API_NUM_THREADS = 8, 17, 18
METADATA_REQUEST = 1  # a value of the extension's type
API_VERSION = 3 << 32  # minor in the upper half, major 0: what the oldest supported jaxlib has

# Places in the words that the threads of a call share.
_NEXT_ITEM, _COUNT, _NUM_DONE, _FRAME, _NUM_HOLDERS, _SHARED_WORDS = 0, 1, 2, 3, 4, 5


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(typing_context, address):  # type: ignore[no-untyped-def]
        signature = types.CPointer(element)(types.int64)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, generate

    return pointer


_word_pointer, _i32_pointer = _pointer_to(types.int64), _pointer_to(types.int32)
_f32_pointer, _u16_pointer = _pointer_to(types.float32), _pointer_to(types.uint16)


@intrinsic
def _fetch_add(typing_context, address, value):  # type: ignore[no-untyped-def]
    """The word at an address before a value was added to it, atomically."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(typing_context, function, argument):  # type: ignore[no-untyped-def]
    """Calls the C function at an address with one word; returns one."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(WORD, [WORD]).as_pointer())
        return builder.call(pointer, [arguments[1]])

    return types.int64(types.int64, types.int64), generate


def _address_of(symbol: str) -> Any:
    """The address of a function by name: looked up when code is linked, so that cached code stays right."""

    @intrinsic
    def address(typing_context):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORD]), symbol)
            return builder.ptrtoint(function, WORD)

        return types.int64(), generate

    return address


def named(*tags: Any) -> Callable[[Any], Any]:
    """Decorates a nested function, below `njit`, with what its enclosing function was given.

    Numba names machine code after the function and a number that counts anew in every process. Code that different
    processes have kept meets in a third one, where of two functions of a name the first is called for both.
    """

    def name(function: Any) -> Any:
        function.__qualname__ += "".join(f"_{tag}" for tag in tags)
        return function

    return name


# C's own: numba gives an array back after its last use by name, and does not see the uses of its address.
malloc: Any = types.ExternalFunction("malloc", types.int64(types.int64))
free: Any = types.ExternalFunction("free", types.void(types.int64))


@njit
def words(address: int, count: int = 32) -> Any:
    return carray(_word_pointer(address), count)


@njit
def floats(address: int, shape: Any) -> Any:
    return carray(_f32_pointer(address), shape)


@njit
def halves(address: int, shape: Any) -> Any:
    """Elements of 16 bits."""
    return carray(_u16_pointer(address), shape)


@njit
def integers(address: int, shape: Any) -> Any:
    return carray(_i32_pointer(address), shape)


@njit
def argument(frame: int, index: int) -> Any:
    """The address of an argument's data, and its dimensions."""
    buffer = words(words(words(frame)[FRAME_ARGS])[index])
    return buffer[BUFFER_DATA], words(buffer[BUFFER_DIMS])


@njit
def argument_rank(frame: int, index: int) -> int:
    return words(words(words(frame)[FRAME_ARGS])[index])[BUFFER_RANK]


@njit
def result(frame: int, index: int) -> Any:
    """The address of a result's data, and its dimensions."""
    buffer = words(words(words(frame)[FRAME_RESULTS])[index])
    return buffer[BUFFER_DATA], words(buffer[BUFFER_DIMS])


@njit
def _answers_metadata(frame: int) -> bool:
    """Whether this was not a call but the question for the handler's version, which is answered."""
    extension = words(frame)[FRAME_EXTENSION]
    if extension == 0 or (words(extension)[EXTENSION_TYPE] & 0xFFFFFFFF) != METADATA_REQUEST:
        return False
    metadata = words(words(extension)[EXTENSION_METADATA])
    metadata[METADATA_VERSION] = API_VERSION
    metadata[METADATA_TRAITS] = 0
    return True


@njit
def _ask(frame: int, function: int, x: int, y: int) -> bool:
    """Calls a function of XLA's interface with the frame's context and two more words; whether it went well."""
    request = malloc(8 * 5)
    w, api = words(request), words(words(frame)[FRAME_API])
    w[0], w[1], w[2], w[3], w[4] = 40, 0, words(frame)[FRAME_CONTEXT], x, y
    error = _call(api[function], request)
    if error != 0:
        w[0], w[1], w[2] = 24, 0, error
        _call(api[API_DESTROY_ERROR], request)
    free(request)
    return error == 0


@njit
def _num_threads(frame: int) -> int:
    """Of XLA's pool; 1 where it has none."""
    found = malloc(8)
    words(found)[0] = 1
    _ask(frame, API_NUM_THREADS, found, 0)
    count = words(found)[0]
    free(found)
    return max(count, 1)


# Templates: `link` gives a copy of each the functions it calls.
_kernel: Any = None
_num_items: Any = None
_run_item: Any = None
_work_on: Any = None
_work_address: Any = None


def _item(frame: int, item: int, count: int) -> None:
    _kernel(frame, item, count)


def _work(shared: int) -> int:
    state = words(shared)
    while True:
        item = _fetch_add(shared + 8 * _NEXT_ITEM, 1)
        if item >= state[_COUNT]:
            break
        _run_item(state[_FRAME], item, state[_COUNT])
        _fetch_add(shared + 8 * _NUM_DONE, 1)
    if _fetch_add(shared + 8 * _NUM_HOLDERS, -1) == 1:
        free(shared)
    return 0


def _handle(frame: int) -> int:
    if _answers_metadata(frame):
        return 0
    threads = _num_threads(frame)
    count = _num_items(frame, threads)
    if count == 1:
        _run_item(frame, 0, 1)
        return 0
    num_helpers = min(threads, count) - 1
    shared = malloc(8 * _SHARED_WORDS)
    state = words(shared)
    state[_NEXT_ITEM], state[_COUNT], state[_NUM_DONE], state[_FRAME] = 0, count, 0, frame
    state[_NUM_HOLDERS] = num_helpers + 2  # they, `_work_on` called here, and this function
    for _ in range(num_helpers):
        if not _ask(frame, API_SCHEDULE, _work_address(), shared):  # no pool: the caller does it all
            _fetch_add(shared + 8 * _NUM_HOLDERS, -1)
    _work_on(shared)
    while _fetch_add(shared + 8 * _NUM_DONE, 0) < count:
        pass
    if _fetch_add(shared + 8 * _NUM_HOLDERS, -1) == 1:
        free(shared)
    return 0


def link(name: str, signature: Any, template: Callable[..., Any], **functions: Any) -> Any:
    """Compiles a function to C, under a name by which other numba functions call what this returns."""
    _compile(name, signature, template, functions)
    return types.ExternalFunction(name, signature)


def _compile(name: str, signature: Any, template: Callable[..., Any], functions: dict[str, Any]) -> Any:
    """What numba has compiled, for the other threads and the programs to come.

    The machine code is kept as numba does it, beside this file or in the user's cache folder. Its key is the name of
    the function and what this folder holds; numba's own would miss a change of what a function calls.

    Args:
        name: of the C function.
        signature: numba's.
        template: a function of a module, with global names for what it calls.
        functions: what stands for those names.
    """
    function = python_types.FunctionType(template.__code__, {**template.__globals__, **functions}, template.__name__)
    function.__module__, function.__qualname__ = __name__, f"{name}_{_digest()}"
    try:
        compiled = cfunc(signature, cache=True)(function)
    except (RuntimeError, OSError):  # there is no folder that can be written to, or no room
        compiled = cfunc(signature)(function)
    _kept.append(compiled)
    llvmlite.binding.add_symbol(name, compiled.address)
    return compiled


def register(name: str, kernel: Callable[..., None], num_items: Callable[..., int]) -> None:
    """Makes a kernel a target of `jax.ffi.ffi_call` on CPUs.

    Args:
        name: of the target.
        kernel: kernel(frame, item, num_items), compiled by numba.
        num_items: num_items(frame, num_threads), the same; 1: the caller does it alone.
    """
    with _registering:
        if name in _registered:
            return
        _register(name, kernel, num_items)
        _registered.add(name)


def _register(name: str, kernel: Callable[..., None], num_items: Callable[..., int]) -> None:
    word = types.int64
    run_item = link(f"{name}_item", types.void(word, word, word), _item, _kernel=kernel)
    work_on = link(f"{name}_work", word(word), _work, _run_item=run_item)
    address = _address_of(f"{name}_work")
    names = {"_num_items": num_items, "_run_item": run_item, "_work_on": work_on, "_work_address": address}
    handler = _compile(name, word(word), _handle, names)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.ctypes), platform="cpu")


@functools.cache
def _digest() -> str:
    """What differs where the code of this folder does."""
    code = b"".join(path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(code).hexdigest()[:16]


_registering, _registered = threading.Lock(), set[str]()  # several threads may trace programs at once
_kept: list[Any] = []  # compiled code lives as long as its Python object
