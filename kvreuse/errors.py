"""Errors that name the value and the remedy."""


class KVReuseError(Exception):
    """Base of the errors that are particular to this library."""


class UnsupportedModelError(KVReuseError):
    """The model's keys and values cannot be moved or patched correctly; the message names model and reason."""


class PromptTooLongError(KVReuseError, ValueError):
    """The prompt has more tokens than the model's context."""


class IntegrityError(KVReuseError):
    """A data structure broke one of its own rules; the message names it."""


class LostEntryError(KVReuseError):
    """A stored entry cannot be read any more, or is not what was written. The store has dropped it: it is a miss."""

    index: int = -1  # which of a request's entries


class ProfileMismatchError(KVReuseError, ValueError):
    """A `LoadingController`'s profile is of another model, machine setting or storage device; profile again."""
