"""The store: cubins on disk, content-addressed and verified on every read."""

from deepgemm_jit.store.disk import Damage, Store
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.key import SCHEMA, request_key
from deepgemm_jit.store.pack import Pack
from deepgemm_jit.store.packs import FoundPack

__all__ = ["SCHEMA", "Damage", "Entry", "FoundPack", "Pack", "Store", "request_key"]
