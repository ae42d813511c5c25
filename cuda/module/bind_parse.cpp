// Parsers of key text and the word table; called from flashtrie_cli/keys/parsing.py and vocabulary.py.
#include <nanobind/stl/string_view.h>

#include "bindings.hpp"
#include "host/parse.hpp"
#include "host/parse_grid.hpp"
#include "host/parse_jsonl.hpp"
#include "host/parse_words.hpp"

namespace flashtrie {
namespace {

template <typename T>
nb::object buffer_to_numpy(Buffer<T>& buffer) {
  const size_t size = buffer.size();
  buffer.room(1);  // an empty array needs a pointer too
  T* data = buffer.release();
  nb::capsule owner(data, [](void* p) noexcept { free(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner));
}

std::string_view view(const Array<uint8_t>& block) {
  return {reinterpret_cast<const char*>(block.data()), block.size()};
}

// (tokens, offsets, lines, values or None, num_lines, num_empty, fault, fault_line, fault_begin, fault_end)
nb::tuple to_python(ParsedLines& parsed, const LineFormat& format) {
  nb::object values = nb::none();
  if (format.value_column > 0)
    values = parsed.has_floats ? buffer_to_numpy(parsed.float_values) : buffer_to_numpy(parsed.int_values);
  nb::object tokens = buffer_to_numpy(parsed.tokens);
  nb::object offsets = buffer_to_numpy(parsed.offsets);
  nb::object lines = buffer_to_numpy(parsed.lines);
  return nb::make_tuple(tokens, offsets, lines, values, parsed.num_lines, parsed.num_empty,
                        static_cast<int>(parsed.fault), parsed.fault_line, parsed.fault_begin, parsed.fault_end);
}

nb::tuple bound_parse_ids(Array<uint8_t> block, int64_t first_line, int value_column, bool float_values) {
  const LineFormat format{first_line, value_column, float_values};
  ParsedLines parsed;
  {
    nb::gil_scoped_release unlocked;
    parse_ids(view(block), format, parsed);
  }
  return to_python(parsed, format);
}

nb::tuple bound_parse_words(WordTable& table, Array<uint8_t> block, int64_t first_line, int value_column,
                            bool float_values, bool grow) {
  const LineFormat format{first_line, value_column, float_values};
  ParsedLines parsed;
  {
    nb::gil_scoped_release unlocked;
    table.parse(view(block), format, grow, parsed);
  }
  return to_python(parsed, format);
}

// (what `to_python` gives, whether keys have values: see JsonValues, size of what was parsed)
nb::tuple bound_parse_jsonl_keys(Array<uint8_t> block, int64_t first_line, int values, bool float_values) {
  ParsedLines parsed;
  auto state = static_cast<JsonValues>(values);
  size_t size;
  {
    nb::gil_scoped_release unlocked;
    size = parse_jsonl_keys(view(block), first_line, state, float_values, parsed);
  }
  const LineFormat format{first_line, state == JsonValues::present ? 1 : 0, float_values};
  return nb::make_tuple(to_python(parsed, format), static_cast<int>(state), size);
}

template <typename T>
nb::object buffer_to_grid(Buffer<T>& buffer, size_t num_steps, size_t num_slots) {
  buffer.room(1);
  T* data = buffer.release();
  nb::capsule owner(data, [](void* p) noexcept { free(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(data, {num_steps, num_slots}, owner));
}

// (tokens, logprobs, id_begin, id_end), or None for a line that Python must read.
nb::object bound_parse_grid_line(Array<uint8_t> line, size_t max_steps) {
  GridLine grid;
  bool is_usual;
  {
    nb::gil_scoped_release unlocked;
    is_usual = parse_grid_line(view(line), max_steps, grid);
  }
  if (!is_usual) return nb::none();
  nb::object tokens = buffer_to_grid(grid.tokens, grid.num_steps, grid.num_slots);
  nb::object logprobs = buffer_to_grid(grid.logprobs, grid.num_steps, grid.num_slots);
  return nb::make_tuple(tokens, logprobs, grid.id_begin, grid.id_end);
}

// (old id -> rank in byte order, the words in that order, their offsets)
nb::tuple bound_sorted(const WordTable& table) {
  Buffer<uint32_t> ranks;
  Buffer<int64_t> offsets;
  Buffer<uint8_t> text;
  {
    nb::gil_scoped_release unlocked;
    const std::vector<uint32_t> ids = table.sorted_ids();
    ranks.room(ids.size());
    ranks.truncate(ids.size());
    offsets.push_back(0);
    for (size_t rank = 0; rank < ids.size(); ++rank) {
      ranks[ids[rank]] = static_cast<uint32_t>(rank);
      const std::string_view word = table.word(ids[rank]);
      uint8_t* room = text.room(word.size());
      if (!word.empty()) memcpy(room, word.data(), word.size());
      text.set_end(room + word.size());
      offsets.push_back(static_cast<int64_t>(text.size()));
    }
  }
  nb::object ranks_array = buffer_to_numpy(ranks);
  nb::object text_array = buffer_to_numpy(text);
  return nb::make_tuple(ranks_array, text_array, buffer_to_numpy(offsets));
}

void fill_table(WordTable& table, Array<uint8_t> text, Array<int64_t> offsets) {
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    const auto begin = static_cast<size_t>(offsets.data()[i]);
    table.add(view(text).substr(begin, static_cast<size_t>(offsets.data()[i + 1]) - begin));
  }
}

// Keys as text: words joined by a space, keys ended by a newline. Every token must be below num_words.
nb::bytes join_words(Array<uint8_t> text, Array<int64_t> word_offsets, Array<uint32_t> tokens,
                     Array<int64_t> offsets) {
  std::string joined;
  {
    nb::gil_scoped_release unlocked;
    const auto* data = reinterpret_cast<const char*>(text.data());
    for (size_t key = 0; key + 1 < offsets.size(); ++key) {
      for (int64_t i = offsets.data()[key]; i < offsets.data()[key + 1]; ++i) {
        if (i > offsets.data()[key]) joined.push_back(' ');
        const uint32_t token = tokens.data()[i];
        const int64_t begin = word_offsets.data()[token];
        joined.append(data + begin, static_cast<size_t>(word_offsets.data()[token + 1] - begin));
      }
      joined.push_back('\n');
    }
  }
  return nb::bytes(joined.data(), joined.size());
}

}  // namespace

void bind_parse(nb::module_& m) {
  using namespace nb::literals;
  m.def("parse_ids", &bound_parse_ids, "block"_a, "first_line"_a, "value_column"_a, "float_values"_a);
  m.def("parse_jsonl_keys", &bound_parse_jsonl_keys, "block"_a, "first_line"_a, "values"_a, "float_values"_a);
  m.def("parse_grid_line", &bound_parse_grid_line, "line"_a, "max_steps"_a);
  m.def(
      "first_bad_word",
      [](Array<uint8_t> text, Array<int64_t> offsets) {
        nb::gil_scoped_release unlocked;
        return first_bad_word(view(text), offsets.data(), offsets.size() - 1);
      },
      "text"_a, "offsets"_a);
  m.def("join_words", &join_words, "text"_a, "word_offsets"_a, "tokens"_a, "offsets"_a);
  nb::class_<WordTable>(m, "WordTable")
      .def(nb::init<>())
      .def("__len__", &WordTable::num_words)
      .def("find", [](const WordTable& table, nb::bytes word) { return table.find({word.c_str(), word.size()}); })
      .def("add", [](WordTable& table, nb::bytes word) { return table.add({word.c_str(), word.size()}); })
      .def("fill", &fill_table, "text"_a, "offsets"_a)
      .def("parse", &bound_parse_words, "block"_a, "first_line"_a, "value_column"_a, "float_values"_a, "grow"_a)
      .def("sorted", &bound_sorted);
}

}  // namespace flashtrie
