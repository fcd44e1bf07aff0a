"""What Pydantic writes: models, and values as they are dumped."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import uuid
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, RootModel, TypeAdapter
from typing_extensions import TypedDict

from schema_corpus import Row

Value = TypeVar("Value")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    number: int = Field(gt=0, lt=10000)
    zip: str = Field(pattern=r"^\d{5}$")


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=40)
    age: int | None = None
    address: Address
    tags: list[str] = []


class Review(BaseModel):
    rating: int = Field(ge=1, le=5)
    score: float = Field(gt=0, lt=1)
    label: Literal["good", "bad"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    good: bool = True


class Owner(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")


class Plain(BaseModel):
    pet: Cat | Dog | None


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Linked(BaseModel):
    value: int
    next: Linked | None = None


class Expression(BaseModel):
    left: Expression | float
    op: Literal["+", "-"]
    right: Expression | float


class Point(NamedTuple):
    x: float
    y: float


class Movie(TypedDict):
    title: str
    year: int


class Shapes(BaseModel):
    pair: tuple[int, str]
    many: tuple[int, ...]
    point: Point
    movie: Movie


class Maps(BaseModel):
    counts: dict[str, int]
    by_color: dict[Color, float]
    by_name: dict[Annotated[str, Field(pattern="^[a-z]+$")], bool]
    short: dict[str, int] = Field(max_length=2, default={})


class Enums(BaseModel):
    color: Color
    level: Level
    maybe: Color | None = None
    several: list[Literal["a", "b"]] = Field(min_length=1, max_length=2)


class Times(BaseModel):
    day: datetime.date
    at: datetime.datetime
    clock: datetime.time
    wait: datetime.timedelta


class Ids(BaseModel):
    id: uuid.UUID
    v4: Annotated[uuid.UUID, Field(json_schema_extra={"format": "uuid4"})]
    ip: ipaddress.IPv4Address
    url: AnyUrl


class Numbers(BaseModel):
    price: float = Field(ge=0, multiple_of=0.01)
    even: int = Field(multiple_of=2)
    big: int = Field(ge=-(2**63), lt=2**63)
    ratio: Annotated[float, Field(ge=-1, le=1)]


class Aliases(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    from_: str = Field(alias="from")
    schema_: int = Field(alias="$schema")


class Page(BaseModel, Generic[Value]):
    items: list[Value]
    total: int


class Anything(BaseModel):
    data: Any
    extra: dict[str, Any] = {}
    flag: bool | None = None


class Deep(BaseModel):
    layers: list[dict[str, list[tuple[int, int]]]]


class Action(BaseModel):
    thought: str = Field(description="Think step by step.")
    action: Cat | Dog | Address


class Unique(BaseModel):
    ids: set[int]


_STREET = {"street": "Elm", "number": 7, "zip": "01234"}
_MODELS: list[tuple[Any, list[Any], list[Any], str]] = [
    (Address, [_STREET], [{**_STREET, "number": 0}, {**_STREET, "zip": "1234"}, {**_STREET, "zip": "0123x"}, {}], ""),
    (Person, [{"name": "A", "address": _STREET}, {"name": "Ü", "age": None, "address": _STREET, "tags": ["x", ""]}], [{"name": "", "address": _STREET}, {"name": "A", "age": "1", "address": _STREET}, {"name": "A", "address": {}}], ""),
    (Review, [{"rating": 5, "score": 0.5, "label": "bad"}], [{"rating": 92, "score": 0.5, "label": "bad"}, {"rating": 5, "score": 1, "label": "bad"}, {"rating": 5, "score": 0.5, "label": "so"}], ""),
    (Strict, [{"a": 1, "b": None}, {"a": 1, "b": "x"}], [{"a": 1}, {"a": 1, "b": "x", "c": 2}], ""),
    (Loose, [{"a": 1}, {"a": 1, "z": [2]}], [{}, {"a": "x"}], ""),
    (Owner, [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "puppy"}}, {"pet": {"kind": "dog", "good": False}}], [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}, {"pet": None}], ""),
    (Plain, [{"pet": None}, {"pet": {"kind": "cat", "lives": 9}}], [{"pet": {"lives": 9}}, {}], ""),
    (Node, [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3}]}], [{"value": 1, "children": [1]}, {"children": []}], ""),
    (Linked, [{"value": 1}, {"value": 1, "next": {"value": 2, "next": None}}], [{"value": 1, "next": {}}], ""),
    (Expression, [{"left": 1.5, "op": "+", "right": {"left": 1, "op": "-", "right": 2}}], [{"left": 1, "op": "*", "right": 2}, {"left": 1, "op": "+"}], ""),
    (Shapes, [{"pair": [1, "a"], "many": [], "point": [1.5, -2], "movie": {"title": "M", "year": 1931}}], [{"pair": ["a", 1], "many": [], "point": [1, 2], "movie": {"title": "M", "year": 1931}}, {"pair": [1, "a"], "many": [], "point": [1], "movie": {"title": "M", "year": 1931}}, {"pair": [1, "a"], "many": [], "point": [1, 2], "movie": {"title": "M"}}], ""),
    (Maps, [{"counts": {"x": 1}, "by_color": {"red": 1.5}, "by_name": {"ab": True}}, {"counts": {}, "by_color": {}, "by_name": {}, "short": {"a": 1, "b": 2}}], [{"counts": {"x": "1"}, "by_color": {}, "by_name": {}}, {"counts": {}, "by_color": {"blue": 1}, "by_name": {}}, {"counts": {}, "by_color": {}, "by_name": {"ab": 1}}, {"counts": {}, "by_color": {}, "by_name": {}, "short": {"a": 1, "b": 2, "c": 3}}], ""),
    (Enums, [{"color": "red", "level": 3, "several": ["a", "b"]}, {"color": "green", "level": 1, "maybe": None, "several": ["b"]}], [{"color": "blue", "level": 3, "several": ["a"]}, {"color": "red", "level": 2, "several": ["a"]}, {"color": "red", "level": 1, "several": []}, {"color": "red", "level": 1, "several": ["a", "a", "b"]}], ""),
    (Times, [{"day": "2024-02-29", "at": "2024-01-31T23:59:59.5+01:00", "clock": "12:30:00Z", "wait": "P1DT2H"}], [{"day": "2023-02-29", "at": "2024-01-31T23:59:59Z", "clock": "12:30:00Z", "wait": "P1D"}, {"day": "2024-02-28", "at": "2023-02-29T23:59:59Z", "clock": "12:30:00Z", "wait": "P1D"}, {"day": "2024-02-28", "at": "2024-01-31", "clock": "12:30:00Z", "wait": "P1D"}, {"day": "2024-02-28", "at": "2024-01-31T00:00:00Z", "clock": "25:30:00Z", "wait": "P1D"}, {"day": "2024-02-28", "at": "2024-01-31T00:00:00Z", "clock": "12:30:00Z", "wait": "1 day"}], ""),
    (Ids, [{"id": "123e4567-e89b-12d3-a456-426614174000", "v4": "123e4567-e89b-42d3-a456-426614174000", "ip": "10.0.0.255", "url": "https://a.example/b?c#d"}], [{"id": "123e4567", "v4": "123e4567-e89b-42d3-a456-426614174000", "ip": "10.0.0.255", "url": "https://a.b"}, {"id": "123e4567-e89b-12d3-a456-426614174000", "v4": "123e4567-e89b-12d3-a456-426614174000", "ip": "10.0.0.255", "url": "https://a.b"}, {"id": "123e4567-e89b-12d3-a456-426614174000", "v4": "123e4567-e89b-42d3-a456-426614174000", "ip": "10.0.0.256", "url": "https://a.b"}, {"id": "123e4567-e89b-12d3-a456-426614174000", "v4": "123e4567-e89b-42d3-a456-426614174000", "ip": "10.0.0.1", "url": "not a url"}], ""),
    (Numbers, [{"price": 9.99, "even": -4, "big": 10**17, "ratio": -0.25}], [{"price": 9.999, "even": 4, "big": 1, "ratio": 0}, {"price": -1, "even": 4, "big": 1, "ratio": 0}, {"price": 1, "even": 3, "big": 1, "ratio": 0}, {"price": 1, "even": 4, "big": 10**20, "ratio": 0}, {"price": 1, "even": 4, "big": 1, "ratio": 1.01}], ""),
    (Aliases, [{"from": "a", "$schema": 1}], [{"from_": "a", "$schema": 1}, {"from": "a", "$schema": "x"}], ""),
    (Page[Address], [{"items": [_STREET], "total": 1}, {"items": [], "total": 0}], [{"items": [{}], "total": 1}, {"total": 0}], ""),
    (Page[int], [{"items": [1, 2], "total": 2}], [{"items": ["a"], "total": 1}], ""),
    (Anything, [{"data": None}, {"data": {"a": [1]}, "extra": {"k": "v"}, "flag": True}], [{}, {"data": 1, "flag": 1}], ""),
    (Deep, [{"layers": [{"a": [[1, 2], [3, 4]]}, {}]}], [{"layers": [{"a": [[1]]}]}, {"layers": [[]]}], ""),
    (Action, [{"thought": "Hm.", "action": {"kind": "cat", "lives": 1}}, {"thought": "", "action": _STREET}], [{"thought": "x", "action": {}}, {"action": _STREET}], ""),
    (Unique, [{"ids": [1, 2]}], [{"ids": ["a"]}], "uniqueItems"),
    (RootModel[list[Cat]], [[], [{"kind": "cat", "lives": 1}]], [{}, [{}]], ""),
    (RootModel[dict[str, Decimal]], [{"a": 1.5, "b": 2}], [{"a": True}], ""),
]  # fmt: skip
_TYPES: list[tuple[Any, list[Any], list[Any], str]] = [
    (list[Person], [[], [{"name": "A", "address": _STREET}]], [[{}]], ""),
    (int | str, [1, "a"], [1.5, None], ""),
    (dict[Literal["x", "y"], int], [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}], ""),
    (Annotated[list[Annotated[str, Field(max_length=3)]], Field(min_length=2)], [["a", "bcd"]], [["a"], ["a", "abcd"]], ""),
    (Literal["a", 1, None, True], ["a", 1, None, True], ["b", 2, False], ""),
    (Movie, [{"title": "M", "year": 1931}], [{"title": "M"}], ""),
    (tuple[Color, Level], [["red", 1]], [["red"], [1, "red"], ["red", 1, 1]], ""),
]  # fmt: skip


def rows() -> list[Row]:
    """Return a row for each model, with its schema of values that are read, and for those written where it differs."""
    found = []
    for model, yes, no, unenforced in [*_MODELS, *_TYPES]:
        made = TypeAdapter(model)
        name = f"pydantic {getattr(model, '__name__', model)}"
        found.append(Row(name, made.json_schema(), (*yes,), (*no,), unenforced))
    return found
