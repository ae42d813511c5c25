// Keys out of lines of JSON, of the form that programs write: an array of token ids, or an object with
// such an array as `tokens`, maybe a number as `value`, and other members of one value each. The first line
// of any other form is left, with all that follow, to Python (flashtrie_cli/keys/jsonl_keys.py), which
// then also says what is wrong.
#pragma once
#include "parse.hpp"

namespace flashtrie {

enum class JsonValues : int { unknown = 0, present = 1, absent = 2 };

// Appends the keys of the usual lines at the front of a block of whole lines; blank lines are counted.
// All keys must have a value or none: `values` says which was so before, and afterwards is so. Returns
// the size of what was parsed: the whole block, or up to a line for Python.
size_t parse_jsonl_keys(std::string_view block, int64_t first_line, JsonValues& values, bool float_values,
                        ParsedLines& out);

}  // namespace flashtrie
