"""What a JSON Schema says for certain: facts that hold for every instance it allows. Knowing less is always safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Choice = tuple[Sequence["Sub"], bool]
"""Alternatives of which one holds; True: exactly one."""

_ATOMS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OLD = ("draft-03", "draft-04", "draft-06", "draft-07")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEPTH = 64


@dataclass(eq=False)
class Document:
    """A schema with the documents that it refers to by name."""

    root: Any
    references: Mapping[str, Document] = field(default_factory=dict)

    @cached_property
    def draft(self) -> str:
        named = self.root.get("$schema") if isinstance(self.root, dict) else None
        return str(named).rstrip("#") if named else "https://json-schema.org/draft/2020-12/schema"

    @cached_property
    def is_old(self) -> bool:
        return any(each in self.draft for each in _OLD)

    @cached_property
    def _has_inner_ids(self) -> bool:
        return any(
            isinstance(each.get(key), str)
            for each in _objects(self.root)
            for key in ("$id", "id")
            if each is not self.root
        )

    def is_same(self, other: Document) -> bool:
        """Whether the whole documents are the same, references included."""
        return (
            equals(self.root, other.root)
            and self.references.keys() == other.references.keys()
            and all(each.is_same(other.references[name]) for name, each in self.references.items())
        )

    def resolve(self, reference: Any) -> Sub | None:
        """What a reference leads to; None: elsewhere, or relative to an `$id` that is not the document's."""
        if not isinstance(reference, str) or self._has_inner_ids:
            return None
        base, _, fragment = reference.partition("#")
        document = self._document(base)
        if document is None or (fragment and not fragment.startswith("/")):
            return None
        found = document.root
        for part in fragment.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return None
        return Sub(document, found) if isinstance(found, dict | bool) else None

    def _document(self, base: str) -> Document | None:
        own = self.root.get("$id") if isinstance(self.root, dict) else None
        if not base or (own and base == str(own).rstrip("#")):
            return self
        for name, each in self.references.items():
            identity = each.root.get("$id") if isinstance(each.root, dict) else None
            if base in (name, identity):
                return each
        return None


NOTHING = Document({})


@dataclass(frozen=True, eq=False)
class Sub:
    """A part of a document: an object, or true or false."""

    document: Document
    value: Any

    def under(self, key: str) -> list[Sub]:
        """The schemas of a list such as `anyOf`."""
        return [Sub(self.document, each) for each in self.value.get(key, ())]


class State:
    """What is known of an instance: plain objects that all hold, choices of which one holds each, and what is excluded."""

    def __init__(self, facts: Sequence[Sub], choices: Sequence[Choice] = (), excluded: Sequence[Sub] = ()) -> None:
        self.facts = list(facts)
        self.choices = list(choices)
        self.excluded = list(excluded)

    @classmethod
    def of(cls, *subs: Sub) -> State:
        state = cls([])
        for each in subs:
            state._add(each, 0)
        return state

    def also(self, sub: Sub, excluded: Sequence[Sub]) -> State:
        state = State(self.facts, self.choices, [*self.excluded, *excluded])
        state._add(sub, 0)
        return state

    def without_choice(self, place: int) -> State:
        return State(self.facts, [each for n, each in enumerate(self.choices) if n != place], self.excluded)

    def _add(self, sub: Sub, depth: int) -> None:
        if sub.value is True or depth > _DEPTH:
            return
        self.facts.append(sub)
        if sub.value is False:
            return
        if "$ref" in sub.value:
            target = sub.document.resolve(sub.value["$ref"])
            if sub.document.is_old:
                self.facts.pop()
            if target is not None and not any(target.value is fact.value for fact in self.facts):
                self._add(target, depth + 1)
            if sub.document.is_old:
                return
        for each in sub.under("allOf"):
            self._add(each, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in sub.value:
                self.choices.append((sub.under(key), key == "oneOf"))

    @property
    def key(self) -> tuple[Any, ...]:
        choices = tuple(id(each.value) for alternatives, _ in self.choices for each in alternatives)
        return (
            frozenset(id(each.value) for each in self.facts),
            choices,
            tuple(id(each.value) for each in self.excluded),
        )

    @cached_property
    def is_empty(self) -> bool:
        """True when no instance can be so."""
        return any(each.value is False for each in self.facts) or not self.types

    @cached_property
    def types(self) -> frozenset[str]:
        found = _ATOMS
        for each in self._objects:
            if "type" in each:
                found &= types_of(each["type"])
            if "const" in each:
                found &= {_atom(each["const"])}
            if "enum" in each:
                found &= {_atom(value) for value in each["enum"]}
        return found

    @cached_property
    def finite(self) -> list[Any] | None:
        """Every value that there can be; None: too many."""
        found: list[Any] | None = None
        for each in self._objects:
            for values in ([each["const"]] if "const" in each else None, each.get("enum")):
                if values is not None:
                    among = values if found is None else found
                    found = [one for one in among if any(equals(one, two) for two in values)]
        if found is None and self.types <= {"null", "boolean"}:
            found = [None, False, True]
        return None if found is None else [each for each in found if _atom(each) in self.types]

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(name for each in self._objects for name in each.get("required", ()) if isinstance(name, str))

    @cached_property
    def property_names(self) -> list[str]:
        return list(dict.fromkeys(name for each in self._objects for name in each.get("properties", ())))

    def value_of(self, name: str) -> State:
        """What is known of the value under a name, if there is one."""
        found = []
        for fact in self.facts:
            if isinstance(fact.value, dict):
                known = fact.value.get("properties", {})
                if name in known:
                    found.append(Sub(fact.document, known[name]))
                elif "additionalProperties" in fact.value and "patternProperties" not in fact.value:
                    found.append(Sub(fact.document, fact.value["additionalProperties"]))
        return State.of(*found)

    @property
    def other_properties(self) -> State:
        """What is known of a value under a name that no `properties` has."""
        return State.of(
            *(
                Sub(fact.document, fact.value["additionalProperties"])
                for fact in self.facts
                if isinstance(fact.value, dict)
                and "additionalProperties" in fact.value
                and "patternProperties" not in fact.value
            )
        )

    def items(self, place: int) -> State:
        """What is known of the item at a place."""
        return State.of(*(items_at(fact, place) for fact in self.facts))

    def has(self, key: str, value: Any) -> bool:
        return any(key in each and equals(each[key], value) for each in self._objects)

    def numbers(self, key: str) -> list[Any]:
        return [each[key] for each in self._objects if key in each and not isinstance(each[key], bool)]

    def lower(self, key: str) -> Any:
        return max(self.numbers(key), default=0)

    def upper(self, key: str) -> Any:
        return min(self.numbers(key), default=None)

    @property
    def _objects(self) -> Iterator[dict[str, Any]]:
        return (each.value for each in self.facts if isinstance(each.value, dict))


def prefix_of(sub: Sub) -> list[Any]:
    """The schemas of an array's first items."""
    if not isinstance(sub.value, dict):
        return []
    if isinstance(sub.value.get("items"), list):  # up to 2019-09
        return list(sub.value["items"])
    return list(sub.value.get("prefixItems", ())) if "2020-12" in sub.document.draft else []


def items_at(sub: Sub, place: int) -> Sub:
    """The schema of the item at a place."""
    prefix = prefix_of(sub)
    if place < len(prefix):
        return Sub(sub.document, prefix[place])
    if not isinstance(sub.value, dict):
        return Sub(sub.document, True)
    key = "additionalItems" if isinstance(sub.value.get("items"), list) else "items"
    return Sub(sub.document, sub.value.get(key, True))


def types_of(given: Any) -> frozenset[str]:
    """What `type` allows; a number is a whole one or a fraction."""
    names = {given} if isinstance(given, str) else set(given)
    return frozenset({"integer", "fraction"} | names - {"number"}) if "number" in names else frozenset(names)


def type_name(types: frozenset[str]) -> str:
    if types == _ATOMS:
        return "any type"
    names = {"number"} | types - {"integer", "fraction"} if "fraction" in types else types
    return " or ".join(sorted(names))


def equals(one: Any, two: Any) -> bool:
    """JSON's equality: 1 is 1.0, and true is not 1."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(equals(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(equals, one, two))
    return isinstance(one, bool) == isinstance(two, bool) and bool(one == two)


def has_references(value: Any) -> bool:
    """Whether something in a schema is defined elsewhere, where it may have changed."""
    return any(key in each for each in _objects(value) for key in _REFERENCES)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield each
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def _atom(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
