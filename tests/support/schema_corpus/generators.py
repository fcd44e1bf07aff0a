"""Shapes that other generators write: zod-to-json-schema, zod 4, invopop/jsonschema, typescript-json-schema, .NET, OpenAI."""

from schema_corpus import Row

D7, D12 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
INT, STR, NUM, BOOL, NULL = ({"type": name} for name in ("integer", "string", "number", "boolean", "null"))
CLOSED = {"additionalProperties": False}


def obj(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": [*required], **more}


def zod3(root, **definitions):
    """Return what zod-to-json-schema writes of a schema with a name."""
    return {"$ref": "#/definitions/S", "definitions": {"S": root, **definitions}, "$schema": D7}


ROWS = [
    # zod-to-json-schema (zod 3): draft 7, closed, repeated parts by their path
    Row("zod3 object", {**obj({"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}, "email": {"type": "string", "format": "email"}}, "name", "age", **CLOSED), "$schema": D7}, ({"name": "A", "age": 3}, {"name": "A", "age": 3, "email": "a@b.co"}), ({"name": "", "age": 3}, {"name": "A", "age": -1}, {"name": "A", "age": 3, "email": "x"})),
    Row("zod3 named", zod3(obj({"id": STR}, "id", **CLOSED)), ({"id": "x"},), ({}, {"id": 1})),
    Row("zod3 parts by path", zod3(obj({"home": obj({"zip": STR}, "zip", **CLOSED), "work": {"$ref": "#/definitions/S/properties/home"}}, "home", "work", **CLOSED)), ({"home": {"zip": "1"}, "work": {"zip": "2"}},), ({"home": {"zip": "1"}, "work": {}},)),
    Row("zod3 lazy", zod3(obj({"name": STR, "children": {"type": "array", "items": {"$ref": "#/definitions/S"}}}, "name", "children", **CLOSED)), ({"name": "a", "children": [{"name": "b", "children": []}]},), ({"name": "a", "children": [{}]}, {"name": "a"})),
    Row("zod3 discriminatedUnion", {"anyOf": [obj({"t": {"type": "string", "const": "a"}, "x": NUM}, "t", "x", **CLOSED), obj({"t": {"type": "string", "const": "b"}}, "t", **CLOSED)], "$schema": D7}, ({"t": "a", "x": 1.5}, {"t": "b"}), ({"t": "a"}, {"t": "b", "x": 1}, {"t": "c"})),
    Row("zod3 tuple", {"type": "array", "minItems": 2, "maxItems": 2, "items": [STR, NUM], "$schema": D7}, (["a", 1.5],), (["a"], [1, "a"], ["a", 1, 2])),
    Row("zod3 tuple with rest", {"type": "array", "minItems": 1, "items": [STR], "additionalItems": NUM, "$schema": D7}, (["a"], ["a", 1, 2]), ([], ["a", "b"])),
    Row("zod3 nullable", obj({"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "object", "properties": {"c": NUM}, "required": ["c"]}, {"type": "null"}]}}, "a", "b"), ({"a": None, "b": None}, {"a": "x", "b": {"c": 1}}), ({"a": 1, "b": None}, {"a": None, "b": {}})),
    Row("zod3 enum", obj({"c": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "number", "enum": [1, 2]}}, "c", "n", **CLOSED), ({"c": "red", "n": 2},), ({"c": "blue", "n": 2}, {"c": "red", "n": 3})),
    Row("zod3 record", {"type": "object", "additionalProperties": {"type": "number"}, "$schema": D7}, ({}, {"a": 1.5}), ({"a": "x"},)),
    Row("zod3 record of keys", {"type": "object", "additionalProperties": NUM, "propertyNames": {"minLength": 2}}, ({"ab": 1},), ({"a": 1}, {"ab": "x"})),
    Row("zod3 intersection", {"allOf": [obj({"a": STR}, "a"), obj({"b": NUM}, "b")], "$schema": D7}, ({"a": "x", "b": 1},), ({"a": "x"}, {"a": 1, "b": 1})),
    Row("zod3 strings", obj({"u": {"type": "string", "format": "uuid"}, "d": {"type": "string", "format": "date-time"}, "r": {"type": "string", "pattern": "^[a-z]{3}$"}, "s": {"type": "string", "pattern": "^ab"}, "l": {"type": "string", "minLength": 3, "maxLength": 3}}, "u", "d", "r", "s", "l", **CLOSED), ({"u": "123e4567-e89b-12d3-a456-426614174000", "d": "2024-01-01T00:00:00Z", "r": "abc", "s": "abz", "l": "xyz"},), ({"u": "x", "d": "2024-01-01T00:00:00Z", "r": "abc", "s": "abz", "l": "xyz"}, {"u": "123e4567-e89b-12d3-a456-426614174000", "d": "x", "r": "abc", "s": "abz", "l": "xyz"})),
    Row("zod3 positive", {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}, (0.5, 3), (0, -1, 0.3)),
    Row("zod3 literal", {"type": "number", "const": 5}, (5,), (4, "5")),
    Row("zod3 array", {"type": "array", "items": obj({"k": BOOL}, "k", **CLOSED), "minItems": 1, "maxItems": 2}, ([{"k": True}],), ([], [{"k": 1}], [{"k": True}] * 3)),
    Row("zod3 any", obj({"x": {}}, **CLOSED), ({}, {"x": None}, {"x": [1]}), ({"y": 1},)),
    # zod 4's own: draft 2020-12
    Row("zod4 object", {"$schema": D12, **obj({"a": STR, "b": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}}, "a", "b", **CLOSED)}, ({"a": "x", "b": 9007199254740991},), ({"a": "x", "b": 9007199254740992}, {"a": "x"})),
    Row("zod4 record", {"$schema": D12, "type": "object", "propertyNames": STR, "additionalProperties": NUM}, ({"a": 1.5}, {}), ({"a": "x"},)),
    Row("zod4 record of an enum", {"$schema": D12, "type": "object", "propertyNames": {"type": "string", "enum": ["x", "y"]}, "additionalProperties": NUM, "required": ["x", "y"]}, ({"x": 1, "y": 2},), ({"x": 1}, {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": "a"})),
    Row("zod4 tuple", {"$schema": D12, "type": "array", "prefixItems": [STR, NUM], "items": BOOL, "minItems": 2}, (["a", 1], ["a", 1, True]), (["a"], ["a", 1, 2])),
    Row("zod4 union", {"$schema": D12, "anyOf": [STR, NUM, NULL]}, ("a", 1.5, None), (True, [])),
    Row("zod4 discriminatedUnion", {"$schema": D12, "oneOf": [obj({"t": {"type": "string", "const": "a"}}, "t", **CLOSED), obj({"t": {"type": "string", "const": "b"}, "n": NUM}, "t", "n", **CLOSED)]}, ({"t": "a"}, {"t": "b", "n": 1}), ({"t": "b"}, {"t": "a", "n": 1})),
    Row("zod4 recursive", {"$schema": D12, **obj({"name": STR, "sub": {"type": "array", "items": {"$ref": "#"}}}, "name", "sub", **CLOSED)}, ({"name": "a", "sub": [{"name": "b", "sub": []}]},), ({"name": "a", "sub": [1]},)),
    Row("zod4 definitions", {"$schema": D12, **obj({"a": {"$ref": "#/$defs/__schema0"}, "b": {"$ref": "#/$defs/__schema0"}}, "a", "b", **CLOSED), "$defs": {"__schema0": {"type": "string", "minLength": 2}}}, ({"a": "xx", "b": "yy"},), ({"a": "x", "b": "yy"},)),
    Row("zod4 email", {"$schema": D12, "type": "string", "format": "email", "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"}, ("a@b.co",), ("a", "a@"), unenforced="(?!"),
    Row("zod4 ISO date", {"$schema": D12, "type": "string", "format": "date", "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))$"}, ("2024-02-29",), ("2023-02-29", "2024-13-01")),
    # invopop/jsonschema (Go): everything by reference, $id of the package
    Row("invopop struct", {"$schema": D12, "$id": "https://example.com/pkg/config", "$ref": "#/$defs/Config", "$defs": {"Config": obj({"name": {"type": "string", "title": "the name"}, "level": {"$ref": "#/$defs/Level"}, "tags": {"type": "array", "items": STR}}, "name", "level", **CLOSED), "Level": {"type": "string", "enum": ["low", "high"], "default": "low"}}}, ({"name": "a", "level": "low"}, {"name": "a", "level": "high", "tags": ["x"]}), ({"name": "a", "level": "mid"}, {"name": "a"})),
    Row("invopop maps and times", {"$schema": D12, "$ref": "#/$defs/M", "$defs": {"M": obj({"labels": {"additionalProperties": STR, "type": "object"}, "at": {"type": "string", "format": "date-time"}, "raw": True, "any": {"type": "string", "contentEncoding": "base64"}}, "labels", "at", **CLOSED)}}, ({"labels": {"a": "b"}, "at": "2024-01-01T00:00:00Z"}, {"labels": {}, "at": "2024-01-01T00:00:00Z", "raw": [1], "any": "aGk="}), ({"labels": {"a": 1}, "at": "2024-01-01T00:00:00Z"}, {"labels": {}, "at": "now"})),
    Row("invopop array of a size", {"$ref": "#/$defs/V", "$defs": {"V": obj({"xyz": {"items": NUM, "type": "array", "maxItems": 3, "minItems": 3}}, "xyz", **CLOSED)}}, ({"xyz": [1, 2.5, 3]},), ({"xyz": [1, 2]}, {"xyz": [1, 2, 3, 4]})),
    Row("invopop int map", {"$ref": "#/$defs/V", "$defs": {"V": obj({"m": {"patternProperties": {"^[0-9]+$": STR}, "additionalProperties": False, "type": "object"}}, "m", **CLOSED)}}, ({"m": {"12": "a"}}, {"m": {}}), ({"m": {"x": "a"}}, {"m": {"1": 2}})),
    Row("invopop oneof_required", {"$ref": "#/$defs/P", "$defs": {"P": {"oneOf": [{"required": ["number"], "title": "n"}, {"required": ["text"], "title": "t"}], **obj({"number": INT, "text": STR}, **CLOSED)}}}, ({"number": 1}, {"text": "a"}), ({}, {"number": "x"}), unenforced="oneOf"),
    Row("invopop recursive", {"$ref": "#/$defs/T", "$defs": {"T": obj({"v": INT, "left": {"$ref": "#/$defs/T"}, "right": {"$ref": "#/$defs/T"}}, "v", **CLOSED)}}, ({"v": 1}, {"v": 1, "left": {"v": 0}, "right": {"v": 2, "left": {"v": 3}}}), ({"v": 1, "left": {}},)),
    # typescript-json-schema and ts-json-schema-generator
    Row("typescript interface", {"$schema": D7, **obj({"id": NUM, "kind": {"enum": ["a", "b"], "type": "string"}, "on": {"$ref": "#/definitions/Record<string,boolean>"}}, "id", "kind"), "definitions": {"Record<string,boolean>": {"type": "object"}}}, ({"id": 1.5, "kind": "a"}, {"id": 1, "kind": "b", "on": {"x": True}}), ({"id": 1, "kind": "c"}, {"id": 1, "kind": "a", "on": 1})),
    Row("typescript generic", {"$schema": D7, "$ref": "#/definitions/Page%3CItem%3E", "definitions": {"Page<Item>": obj({"items": {"type": "array", "items": {"$ref": "#/definitions/Item"}}}, "items", **CLOSED), "Item": obj({"n": NUM}, "n", **CLOSED)}}, ({"items": [{"n": 1}]},), ({"items": [{}]}, {})),
    Row("typescript union", {"$schema": D7, "$ref": "#/definitions/U", "definitions": {"U": {"anyOf": [{"$ref": "#/definitions/A"}, {"type": "string", "const": "none"}, {"type": "array", "items": {"$ref": "#/definitions/A"}}]}, "A": obj({"a": {"type": ["string", "number", "null"]}}, "a", **CLOSED)}}, ("none", {"a": None}, [{"a": "x"}, {"a": 1}]), ("some", {"a": True}, [[]])),
    Row("typescript index signature", {"$schema": D7, "type": "object", "properties": {"name": STR}, "required": ["name"], "additionalProperties": {"anyOf": [STR, NUM]}}, ({"name": "a", "x": 1}, {"name": "a", "y": "b"}), ({"name": 1}, {"name": "a", "x": None})),
    Row("typescript tuple", {"$schema": D7, "type": "array", "items": [{"type": "number", "title": "x"}, {"type": "number", "title": "y"}], "minItems": 2, "maxItems": 2}, ([1, 2],), ([1], [1, 2, 3], ["a", 1])),
    Row("typescript Date", {"$schema": D7, **obj({"at": {"type": "string", "format": "date-time"}, "re": {"type": "string", "description": "d"}}, "at"), "definitions": {}}, ({"at": "2024-01-01T00:00:00Z"},), ({"at": "1"},)),
    # .NET's JsonSchemaExporter, Java's victools, Rust's schemars
    Row(".NET nullable object", {"type": ["object", "null"], "properties": {"Name": {"type": ["string", "null"]}, "Age": INT}, "required": ["Name", "Age"], "additionalProperties": False}, ({"Name": None, "Age": 1}, None), ({"Name": "a"}, 1)),
    Row(".NET dictionary", {"type": "object", "additionalProperties": {"type": ["integer", "null"], "format": "int32"}}, ({"a": None, "b": 7}, {}), ({"a": 2**31}, {"a": "x"})),
    Row("schemars enum", {"$schema": D7, "title": "E", "oneOf": [{"type": "string", "enum": ["Unit"]}, obj({"Tuple": {"type": "array", "items": [{"type": "integer", "format": "uint8", "minimum": 0}, STR], "maxItems": 2, "minItems": 2}}, "Tuple", **CLOSED), obj({"Struct": obj({"a": BOOL}, "a")}, "Struct", **CLOSED)]}, ("Unit", {"Tuple": [255, "x"]}, {"Struct": {"a": True}}), ("unit", {"Tuple": [256, "x"]}, {"Struct": {}}, {})),
    Row("schemars Option", {"$schema": D7, "title": "S", **obj({"n": {"type": ["integer", "null"], "format": "uint16", "minimum": 0.0}, "b": {"anyOf": [{"$ref": "#/definitions/B"}, {"type": "null"}]}}), "definitions": {"B": obj({"x": {"type": "number", "format": "double"}}, "x")}}, ({}, {"n": None, "b": None}, {"n": 65535, "b": {"x": 0.5}}), ({"n": -1}, {"n": 65536}, {"b": {}})),
    # OpenAI's strict mode
    Row("strict extraction", obj({"name": STR, "date": {"type": ["string", "null"], "format": "date"}, "participants": {"type": "array", "items": STR, "maxItems": 5}}, "name", "date", "participants", **CLOSED), ({"name": "a", "date": None, "participants": []}, {"name": "a", "date": "2024-01-01", "participants": ["x"]}), ({"name": "a", "date": "soon", "participants": []}, {"name": "a", "participants": []})),
    Row("strict steps", obj({"steps": {"type": "array", "items": obj({"explanation": STR, "output": STR}, "explanation", "output", **CLOSED)}, "final_answer": STR}, "steps", "final_answer", **CLOSED), ({"steps": [{"explanation": "e", "output": "o"}], "final_answer": "f"}, {"steps": [], "final_answer": ""}), ({"steps": [{"explanation": "e"}], "final_answer": "f"}, {"final_answer": "f"})),
    Row("strict user interface", obj({"type": {"type": "string", "enum": ["div", "button"]}, "label": STR, "children": {"type": "array", "items": {"$ref": "#"}}, "attributes": {"type": "array", "items": obj({"name": STR, "value": STR}, "name", "value", **CLOSED)}}, "type", "label", "children", "attributes", **CLOSED), ({"type": "div", "label": "", "children": [{"type": "button", "label": "b", "children": [], "attributes": []}], "attributes": [{"name": "n", "value": "v"}]},), ({"type": "p", "label": "", "children": [], "attributes": []}, {"type": "div", "label": "", "children": [{}], "attributes": []})),
    Row("strict anyOf", obj({"item": {"anyOf": [obj({"name": STR, "age": {"type": "number"}}, "name", "age", **CLOSED), obj({"number": STR, "street": STR}, "number", "street", **CLOSED)]}}, "item", **CLOSED), ({"item": {"name": "a", "age": 1}}, {"item": {"number": "1", "street": "s"}}), ({"item": {"name": "a"}}, {"item": {"name": "a", "street": "s"}})),
    Row("strict linked list", obj({"linked_list": {"$ref": "#/$defs/node"}}, "linked_list", **CLOSED, **{"$defs": {"node": obj({"value": NUM, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}}, "value", "next", **CLOSED)}}), ({"linked_list": {"value": 1, "next": {"value": 2, "next": None}}},), ({"linked_list": {"value": 1}}, {"linked_list": None})),
    Row("strict moderation", obj({"is_violating": BOOL, "category": {"type": ["string", "null"], "enum": ["violence", "sexual", None]}, "explanation": {"type": ["string", "null"]}}, "is_violating", "category", "explanation", **CLOSED), ({"is_violating": False, "category": None, "explanation": None}, {"is_violating": True, "category": "violence", "explanation": "x"}), ({"is_violating": True, "category": "other", "explanation": None},)),
]  # fmt: skip
