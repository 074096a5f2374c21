"""Decodes Thrift's compact protocol, in which Parquet stores footers and page headers."""

from __future__ import annotations

from collections.abc import Iterator

LIST, STRUCT = 9, 12  # types of values


class MalformedError(Exception):
    """The bytes are not valid in Thrift's compact protocol."""


class Thrift:
    """Decoder of Thrift's compact protocol; `at` is the position in `data`."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def read_byte(self) -> int:
        if self.at >= len(self.data):
            raise MalformedError
        self.at += 1
        return self.data[self.at - 1]

    def read_varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self.read_byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedError

    def read_fields(self) -> Iterator[tuple[int, int]]:
        """Yields (field number, type) of each field of a struct; the caller must read or skip each field's value."""
        number = 0
        while header := self.read_byte():
            number = number + (header >> 4) if header >> 4 else self.read_integer()
            yield number, header & 15

    def read_integer(self) -> int:
        value = self.read_varint()
        return (value >> 1) ^ -(value & 1)

    def read_list_header(self) -> tuple[int, int]:
        """Reads the header of a list and returns (number of elements, element type)."""
        header = self.read_byte()
        return (header >> 4 if header >> 4 < 15 else self.read_varint()), header & 15

    def skip(self, type_id: int, depth: int = 0) -> None:
        """Skips a value of the given type, with all values nested in it."""
        if depth > 16:
            raise MalformedError
        if type_id in (3, 4, 5, 6):
            self.read_varint() if type_id != 3 else self.read_byte()
        elif type_id == 8:
            length = self.read_varint()
            self.at += length
        elif type_id in (7, 13):
            self.at += 8 if type_id == 7 else 16
        elif type_id in (LIST, 10):
            size, element = self.read_list_header()
            for _ in range(size):
                self.skip_element(element, depth)
        elif type_id == 11:
            if size := self.read_varint():
                key_and_value_types = self.read_byte()
                for _ in range(size):
                    self.skip_element(key_and_value_types >> 4, depth)
                    self.skip_element(key_and_value_types & 15, depth)
        elif type_id == STRUCT:
            for _, field in self.read_fields():
                self.skip(field, depth + 1)
        elif type_id not in (1, 2):
            raise MalformedError

    def skip_element(self, type_id: int, depth: int = 0) -> None:
        """Skips an element of a list or map, in which, unlike in a struct, a boolean takes a byte."""
        if type_id in (1, 2):
            self.read_byte()
        else:
            self.skip(type_id, depth + 1)
