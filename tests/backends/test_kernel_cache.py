"""Kernels on disk: found again, never taken from others, and no failure of a disk is an error of the caller."""

import fcntl
import logging
import multiprocessing
import os
import signal

import pytest

from fusible.ops.kernels.jit.cache import KernelCache, kernel_cache, key_of

KEY = key_of("source", ("options",), (13, 0))


def compiler(log, cubin=b"\x7fELF code"):
    def compile_kernel():
        log.append(cubin)
        return cubin

    return compile_kernel


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "kernels")


def path_of(cache):
    return cache.folder / f"{KEY}.cubin"


def test_a_kernel_is_compiled_once(cache):
    log = []
    assert cache.find(KEY, compiler(log)) == b"\x7fELF code"
    assert KernelCache(cache.folder).find(KEY, compiler(log)) == b"\x7fELF code"
    assert len(log) == 1
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.sizes() == [path_of(cache).stat().st_size]
    assert cache.clear() == 1
    assert not cache.sizes()


def test_everything_a_kernel_depends_on_is_in_its_key():
    keys = {
        KEY,
        key_of("source2", ("options",), (13, 0)),
        key_of("source", (), (13, 0)),
        key_of("source", ("options",), (13, 1)),
    }
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign format", "empty"])
def test_a_broken_kernel_is_compiled_again(cache, damage):
    log = []
    cache.find(KEY, compiler(log))
    content = path_of(cache).read_bytes()
    broken = {
        "truncated": content[:-1],
        "changed": content[:-1] + b"!",
        "foreign format": b"other" + content,
        "empty": b"",
    }[damage]
    path_of(cache).write_bytes(broken)
    assert cache.find(KEY, compiler(log)) == b"\x7fELF code"
    assert len(log) == 2
    assert path_of(cache).read_bytes() == content


def test_a_kernel_under_the_name_of_another_is_not_taken(cache):
    log, other = [], key_of("other")
    cache.find(KEY, compiler([]))
    path_of(cache).rename(cache.folder / f"{other}.cubin")
    assert cache.find(other, compiler(log, b"other")) == b"other"
    assert log == [b"other"]


def test_a_folder_that_cannot_be_written_is_no_error(cache, monkeypatch):
    def mkstemp(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", mkstemp)
    assert cache.find(KEY, compiler([])) == b"\x7fELF code"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(tmp_path, mode, caplog):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "fusible"):
        cache = KernelCache(folder)
    assert cache.refusal == "can be written by others"
    assert "can be written by others" in caplog.text
    log = []
    cache.find(KEY, compiler(log))
    cache.find(KEY, compiler(log))
    assert len(log) == 2
    assert not any(folder.iterdir())


def test_a_link_is_not_followed(tmp_path, cache):
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    assert KernelCache(link).refusal == "is a link or another kind of file"
    log = []
    cache.find(KEY, compiler(log))
    moved = tmp_path / "moved"
    path_of(cache).rename(moved)
    path_of(cache).symlink_to(moved)
    cache.find(KEY, compiler(log))
    assert len(log) == 2
    assert not path_of(cache).is_symlink()


def test_a_pipe_does_not_block(cache):
    os.mkfifo(path_of(cache))
    assert cache.find(KEY, compiler([])) == b"\x7fELF code"


def test_a_file_of_another_user_is_not_read(cache, monkeypatch):
    log = []
    cache.find(KEY, compiler(log))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    cache.find(KEY, compiler(log))
    assert len(log) == 2
    assert KernelCache(cache.folder).refusal == f"belongs to user {os.getuid()}"


def test_a_kernel_that_others_can_write_is_not_read(cache):
    log = []
    cache.find(KEY, compiler(log))
    path_of(cache).chmod(0o666)
    cache.find(KEY, compiler(log))
    assert len(log) == 2


def test_a_full_disk_is_no_error(cache, monkeypatch, caplog):
    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with caplog.at_level(logging.WARNING, "fusible"):
        assert cache.find(KEY, compiler([])) == b"\x7fELF code"
    assert "No space left" in caplog.text
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]


def test_a_home_that_is_no_folder_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path / "file" / "inside"))
    kernel_cache.cache_clear()
    try:
        cache = kernel_cache()
        assert cache.refusal == "cannot be used: Not a directory"
        assert cache.find(KEY, compiler([])) == b"\x7fELF code"
    finally:
        kernel_cache.cache_clear()


def test_a_compiler_that_fails_leaves_nothing(cache):
    def fails():
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        cache.find(KEY, fails)
    assert not cache.sizes()
    assert cache.find(KEY, compiler([])) == b"\x7fELF code"


def _find(folder, log, start):
    start.wait()

    def compile_kernel():
        with open(log, "a") as file:
            file.write("compiled\n")
        return b"code" * 1000

    assert KernelCache(folder).find(KEY, compile_kernel) == b"code" * 1000


def test_one_of_many_processes_compiles(tmp_path):
    context = multiprocessing.get_context("fork")
    start, log = context.Event(), tmp_path / "log"
    processes = [context.Process(target=_find, args=(tmp_path / "kernels", log, start)) for _ in range(6)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert log.read_text() == "compiled\n"


def _writes_without_a_lock(folder, both, cubin):
    fcntl.flock = _refuses

    def compile_kernel():
        both.wait()
        return cubin

    for i in range(10):
        assert KernelCache(folder).find(key_of(i), compile_kernel) == cubin


def _refuses(*_):
    raise OSError(37, "No locks available")


def test_two_writers_that_cannot_lock_leave_whole_kernels(tmp_path):
    context, folder = multiprocessing.get_context("fork"), tmp_path / "kernels"
    both, cubins = context.Barrier(2), [letter * 2_000_000 for letter in (b"a", b"b")]
    processes = [context.Process(target=_writes_without_a_lock, args=(folder, both, cubin)) for cubin in cubins]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    log, cache = [], KernelCache(folder)
    assert all(cache.find(key_of(i), compiler(log)) in cubins for i in range(10))
    assert not log
    assert not [*folder.glob(".new-*")]


def _is_killed_as_it_writes(folder):
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    KernelCache(folder).find(KEY, lambda: b"code" * 1000)


def test_a_writer_that_is_killed_holds_nobody_up(cache):
    process = multiprocessing.get_context("fork").Process(target=_is_killed_as_it_writes, args=(cache.folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not cache.sizes()
    assert [path.suffix for path in cache.folder.iterdir() if not path.name.startswith(".new-")] == [".lock"]
    log = []
    assert cache.find(KEY, compiler(log)) == cache.find(KEY, compiler(log)) == b"\x7fELF code"
    assert len(log) == 1
    assert cache.clear() == 1
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]
