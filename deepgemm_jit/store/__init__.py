"""The store: cubins on disk, content-addressed and verified on every read."""

from deepgemm_jit.store.disk import Damage, Store
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.key import SCHEMA, request_key

__all__ = ["SCHEMA", "Damage", "Entry", "Store", "request_key"]
