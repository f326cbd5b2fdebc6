"""Gives a program its own folders to write to: what it writes lands elsewhere, they stay as is.

An overlay is mounted over each folder at the folder's own path, in a mount namespace that ends with
the last of its processes: absolute paths hold, and nothing is copied. Run as a file, it mounts and
becomes the command:  python -I isolation.py HOME FOLDER ... -- COMMAND
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Sequence

# Of Linux: CLONE_NEWNS, CLONE_NEWUSER, MS_REC | MS_PRIVATE.
NEW_MOUNTS, NEW_USER, PRIVATE = 0x20000, 0x10000000, 0x44000


def mount_overlays(home: str, folders: Sequence[str]) -> None:
    """Mount an overlay over each folder; the n-th writes to upper<n> in home. Raises OSError."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(NEW_MOUNTS | (NEW_USER if uid else 0)))
    names = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in names.items() if uid else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    check(libc.mount(b"none", b"/", None, PRIVATE, None))
    # WHY opened first: the overlay of an outer folder hides what is mounted below it
    below = [os.open(folder, os.O_PATH) for folder in folders]
    for number, folder in sorted(enumerate(folders), key=lambda pair: len(pair[1])):
        shutil.rmtree(f"{home}/work{number}", ignore_errors=True)  # left by the start before
        os.makedirs(f"{home}/work{number}")
        options = f"lowerdir=/proc/self/fd/{below[number]},upperdir={home}/upper{number}"
        options += f",workdir={home}/work{number}" + (",userxattr" if uid else "")
        check(libc.mount(b"overlay", folder.encode(), b"overlay", 0, options.encode()))
        # WHY: the kernel makes it without any right, and only root could remove it afterwards
        os.chmod(f"{home}/work{number}/work", 0o700)


if __name__ == "__main__":
    end = sys.argv.index("--")
    mount_overlays(sys.argv[1], sys.argv[2:end])
    os.chdir(sys.argv[2])  # the old working directory lies below the mount
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
