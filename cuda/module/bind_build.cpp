#include <system_error>

#include "bindings.hpp"
#include "host/index_builder.hpp"

namespace flashtrie {
namespace {

// A place is a file's number and a line in it.
uint64_t place_of(uint64_t file, uint64_t line) { return (file << 44) | line; }

Duplicates duplicates_of(const std::string& rule) {
  const char* names[] = {"first", "last", "min", "max", "sum", "all", "error"};
  for (int i = 0; i < 7; ++i)
    if (rule == names[i]) return static_cast<Duplicates>(i);
  throw std::invalid_argument("unknown rule for duplicates: " + rule);
}

Tails tails_of(const std::string& rule) {
  if (rule == "off") return Tails::kOff;
  if (rule == "on") return Tails::kOn;
  if (rule == "auto") return Tails::kBoth;
  throw std::invalid_argument("unknown rule for tails: " + rule);
}

// Lets Ctrl-C through a long native call.
void poll_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void add_batch(IndexBuilder& builder, Array<uint32_t> tokens, Array<int64_t> offsets,
               std::optional<Array<uint64_t>> values, std::optional<Array<int64_t>> lines, uint64_t file) {
  const size_t num_keys = offsets.size() == 0 ? 0 : offsets.size() - 1;
  if (values && values->size() != num_keys) throw std::invalid_argument("values and keys differ in number");
  if (lines && lines->size() != num_keys) throw std::invalid_argument("lines and keys differ in number");
  const int64_t* at = offsets.data();
  for (size_t i = 0; i < num_keys; ++i)
    if (at[i] < 0 || at[i + 1] < at[i] || static_cast<uint64_t>(at[i + 1]) > tokens.size())
      throw std::invalid_argument("offsets do not ascend within the tokens");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < num_keys; ++i)
    builder.add(tokens.data() + at[i], static_cast<uint32_t>(at[i + 1] - at[i]), values ? values->data()[i] : 0,
                place_of(file, lines ? static_cast<uint64_t>(lines->data()[i]) : 0));
}

void read_section(const IndexBuilder& builder, const std::string& section, size_t chunk_bytes, nb::callable sink) {
  std::vector<uint8_t> buffer;
  auto flush = [&] {
    if (!buffer.empty()) sink(nb::bytes(reinterpret_cast<const char*>(buffer.data()), buffer.size()));
    buffer.clear();
  };
  builder.read(section, [&](const uint8_t* data, size_t size) {
    while (size > 0) {
      const size_t take = std::min(size, chunk_bytes - buffer.size());
      buffer.insert(buffer.end(), data, data + take);
      data += take;
      size -= take;
      if (buffer.size() == chunk_bytes) flush();
    }
  });
  flush();
}

nb::dict counts_dict(const BuildCounts& c) {
  nb::dict d;
  d["num_keys_read"] = c.num_keys_read;
  d["num_keys"] = c.num_keys;
  d["num_duplicates"] = c.num_duplicates;
  d["num_nodes"] = c.num_nodes;
  d["num_tokens"] = c.num_tokens;
  d["depth"] = c.depth;
  d["num_runs"] = c.num_runs;
  d["spilled_bytes"] = c.spilled_bytes;
  d["num_highs"] = c.num_highs;
  d["high_width"] = c.high_width;
  d["label_entropy"] = c.label_entropy;
  d["num_links"] = c.tails.num_links;
  d["num_tail_nodes"] = c.tails.num_nodes;
  d["num_tail_labels"] = c.tails.num_labels;
  d["tail_label_size"] = c.tails.label_size;
  return d;
}

}  // namespace

void bind_build(nb::module_& m) {
  static nb::exception<KeyConflict> conflict(m, "KeyConflict", PyExc_ValueError);
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const KeyConflict& c) {
      const uint64_t mask = (uint64_t(1) << 44) - 1;
      nb::object arguments =
          nb::make_tuple(c.what(), c.first >> 44, c.first & mask, c.second >> 44, c.second & mask, nb::cast(c.tokens));
      PyErr_SetObject(conflict.ptr(), arguments.ptr());
    } catch (const std::system_error& e) {
      nb::object arguments = nb::make_tuple(e.code().value(), std::string(e.code().message()) + ": " + e.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  nb::class_<IndexBuilder>(m, "IndexBuilder", "Sorts keys, makes them unique, lays out the levels of a trie.")
      .def(
          "__init__",
          [](IndexBuilder* self, uint64_t memory, int threads, const std::string& temp_directory,
             const std::string& duplicates, int value_kind, bool is_sorted, bool is_compact,
             const std::string& tails) {
            BuilderOptions options;
            options.memory = memory;
            options.num_threads = threads;
            options.temp_directory = temp_directory;
            options.duplicates = duplicates_of(duplicates);
            options.value_kind = static_cast<ValueKind>(value_kind);
            options.is_sorted = is_sorted;
            options.is_compact = is_compact;
            options.tails = tails_of(tails);
            new (self) IndexBuilder(options);
          },
          nb::kw_only(), nb::arg("memory"), nb::arg("threads"), nb::arg("temp_directory"), nb::arg("duplicates"),
          nb::arg("value_kind"), nb::arg("is_sorted"), nb::arg("is_compact"), nb::arg("tails"))
      .def("add", &add_batch, nb::arg("tokens"), nb::arg("offsets"), nb::arg("values").none(),
           nb::arg("lines").none(), nb::arg("file"))
      .def("finish",
           [](IndexBuilder& b) {
             nb::gil_scoped_release release;
             b.finish(poll_signals);
           })
      .def("use_tails", &IndexBuilder::use_tails, nb::arg("cut"))
      .def("counts", [](const IndexBuilder& b) { return counts_dict(b.counts()); })
      .def("has", &IndexBuilder::has, nb::arg("section"))
      .def("read", &read_section, nb::arg("section"), nb::arg("chunk_bytes"), nb::arg("sink"));
}

}  // namespace flashtrie
