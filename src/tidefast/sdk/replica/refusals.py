"""How the replica's verbs refuse.

Inside this room a refusal is raised, because it comes from deep inside a walk; `Replica` turns it into the value that
goes over the wire. Whoever raises one has changed nothing, or has put back what was changed.
"""

import errno

from tidefast.protocol.canonical import JSON


class NotDone(Exception):
    """A verb is refused: `code` and `reason` as on the wire, one sentence for people, facts for programs."""

    def __init__(self, code: str, reason: str, detail: str, **facts: JSON) -> None:
        super().__init__(detail)
        self.code, self.reason, self.detail, self.facts = code, reason, detail, facts


def conflict(reason: str, path: str, why: str, **facts: JSON) -> NotDone:
    """A refusal because of what stands at a path."""
    return NotDone("conflict", reason, f"{path}: {why}", path=path, **facts)


def misfit(path: str, why: str, **facts: JSON) -> NotDone:
    """A patch that was made for another content than the one that stands there."""
    return conflict("patch_conflict", path, why, **facts)


_BY_ERRNO = {
    errno.ELOOP: ("conflict", "path_is_link", "a symbolic link stands in the path; links are not followed"),
    errno.EXDEV: ("invalid", "path_outside", "the path leads out of the workspace"),
    errno.ENOTDIR: ("conflict", "not_a_directory", "a part of the path that should be a directory is none"),
    errno.EISDIR: ("conflict", "is_a_directory", "a directory stands there"),
    errno.ENOENT: ("not_found", "path_unknown", "nothing stands at this path"),
    errno.EEXIST: ("conflict", "path_exists", "something stands there already"),
    errno.ENOTEMPTY: ("conflict", "directory_not_empty", "the directory isn't empty"),
    errno.ENAMETOOLONG: ("invalid", "path_too_long", "the path is longer than this file system takes"),
    errno.ENXIO: ("conflict", "not_a_file", "a pipe, socket or device stands there"),
    errno.EACCES: ("forbidden", "no_permission", "the replica's user may not do this"),
    errno.EPERM: ("forbidden", "no_permission", "the replica's user may not do this"),
    errno.EROFS: ("forbidden", "read_only", "the file system can't be written"),
    errno.ENOSPC: ("full", "workspace_full", "the disk is full; what stood there is unchanged"),
    errno.EDQUOT: ("full", "workspace_full", "the disk quota is used up; what stood there is unchanged"),
    errno.EFBIG: ("too_large", "file_too_large", "the file is larger than this file system takes"),
    errno.EINVAL: ("conflict", "move_into_itself", "a directory can't be moved into itself"),
}


def told(error: OSError, path: str) -> NotDone:
    """What the operating system said about a path, as a refusal. An error that says the disk is broken stays one."""
    known = _BY_ERRNO.get(error.errno or 0)
    if known is None:
        raise error
    code, reason, detail = known
    return NotDone(code, reason, f"{path}: {detail}", path=path)
