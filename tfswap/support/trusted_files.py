"""Opens folders and files that no other user can have written. Caches hold code and graphs that are executed.

The rules are those of OpenSSH's StrictModes. They hold for a folder, for all folders above it, and for each file in it:
the owner is this user or root, and no one else may write. Group members count as others, unless the group is the user's
own (with the user's name and no other member), as in distributions with a umask of 002. With an access control list,
the group's bits are the mask of all its entries, and count as others'. Anyone may write to a folder with the sticky
bit, since no one can replace another user's files there. Its files are checked one by one.

Invariant: folders are opened from the root down, each relative to the one above it and without following links, and
checked by their descriptors. After a folder has passed, only this user or root can replace it, so that the checked
folder is the one that is used.

Not handled: owners that a user namespace does not map. A parent folder with such an owner counts as root's.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfswap.errors import TfswapError
from tfswap.support.files import replace_whole

ROOT = 0
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
"""The modes of new folders and files."""
ALL_IDS = 2**32 - 1
"""The number of user ids of a namespace that maps all."""


class UntrustedPath(TfswapError):
    """Another user may have written a file or folder."""


@dataclass(frozen=True)
class TrustedFolder:
    """An open folder that has passed the checks.

    Attributes:
        path: its path, with links resolved.
        descriptor: its descriptor, relative to which its files are opened.
    """

    path: Path
    descriptor: int

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file in it.

        Raises:
            UntrustedPath: another user owns the file, or may write to it; or it is no regular file.
            OSError: it is missing, or can't be opened. A link is not followed.
        """
        # O_NONBLOCK: opening a named pipe would wait for its other end.
        opened = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_FILE, dir_fd=self.descriptor)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise UntrustedPath(f"{str(self.path / name)!r} is no regular file")
            _require_trusted(opened, self.path / name)
        except BaseException:
            os.close(opened)
            raise
        return opened

    def read(self, name: str) -> bytes:
        """The content of a file. Raises as `open`."""
        with open(self.open(name), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to a file, whole or not at all. Raises UntrustedPath for another user's file."""
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open(name))
        replace_whole(name, content, mode=PRIVATE_FILE, folder=self.descriptor)


@contextlib.contextmanager
def trusted_folder(path: str | os.PathLike[str], *, create: bool = False) -> Iterator[TrustedFolder]:
    """The folder at `path`, open.

    Args:
        create: create it and missing folders above it, with the mode PRIVATE_FOLDER. Existing folders keep their modes.

    Raises:
        UntrustedPath: another user owns it or a folder above it, or may write there.
        OSError: it is missing, is no folder, or can't be opened.
    """
    real = Path(os.path.realpath(path))
    opened = os.open(real.anchor, os.O_PATH | os.O_DIRECTORY)
    try:
        for folder in (*reversed(real.parents), real):
            if folder.name:
                above, opened = opened, _open_folder(folder.name, opened, create)
                os.close(above)
            _require_trusted(opened, folder, is_above=folder != real)
        yield TrustedFolder(real, opened)
    finally:
        os.close(opened)


def _open_folder(name: str, above: int, create: bool) -> int:
    """A descriptor of the folder `name` in the folder with the descriptor `above`, which stays open."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, PRIVATE_FOLDER, dir_fd=above)
    flags = os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, os.O_RDONLY | flags, dir_fd=above)
    except PermissionError:  # it can be traversed, and not be listed
        return os.open(name, os.O_PATH | flags, dir_fd=above)


def is_own(found: os.stat_result) -> bool:
    """Whether it is a regular file that this user owns."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _require_trusted(descriptor: int, path: Path, *, is_above: bool = False) -> None:
    found, shown = os.fstat(descriptor), repr(str(path))
    owned = found.st_uid in (ROOT, os.geteuid()) or (is_above and _is_unmapped(found.st_uid))
    if not owned:
        raise UntrustedPath(f"{shown} belongs to {_user(found.st_uid)}, who could have put anything into it")
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & stat.S_IWOTH:
        raise UntrustedPath(f"every user may write to {shown}, and could have put anything into it")
    if found.st_mode & stat.S_IWGRP and _has_access_list(descriptor):
        raise UntrustedPath(
            f"users of an access control list may write to {shown}, and could have put anything into it"
        )
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        raise UntrustedPath(
            f"the group {_group(found.st_gid)} may write to {shown}, and its members could have put anything into it"
        )


def _has_access_list(descriptor: int) -> bool:
    """Whether there is an access control list, whose mask the group's bits are. True where that is unknown."""
    try:
        os.getxattr(f"/proc/self/fd/{descriptor}", "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)
    return True


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _is_unmapped(uid: int) -> bool:
    """Whether this user namespace does not map the owner, as that of a rootless container does not map root."""
    try:
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        return mapped < ALL_IDS and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return False


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"the user {uid}"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} ({gid})"
    except KeyError:
        return str(gid)
