#include "bindings.hpp"
#include "host/tails.hpp"

namespace flashtrie {

void bind_tails(nb::module_& m) {
  m.def(
      "unfold_tails",
      [](Array<uint64_t> louds, Array<uint64_t> terminal, Array<uint16_t> label_low, Array<uint64_t> high_flags,
         Array<uint64_t> label_high, int high_width, uint64_t num_stored, uint64_t num_nodes, uint64_t num_links,
         int link_width, Array<uint64_t> link_flags, Array<uint64_t> links, Array<uint64_t> ends,
         Array<uint8_t> labels, int label_size) {
        TrieArrays stored;
        stored.louds = louds.data();
        stored.louds_words = louds.size();
        stored.terminal = terminal.data();
        stored.terminal_words = terminal.size();
        stored.label_low = label_low.data();
        stored.num_labels = label_low.size();
        stored.high_flags = high_flags.data();
        stored.high_flag_words = high_flags.size();
        stored.high_bits = label_high.data();
        stored.high_words = label_high.size();
        stored.high_width = high_width;
        stored.num_nodes = num_stored;
        TailArrays tails;
        tails.link_flags = link_flags.data();
        tails.link_flag_words = link_flags.size();
        tails.links = links.data();
        tails.link_words = links.size();
        tails.link_width = link_width;
        tails.num_links = num_links;
        tails.ends = ends.data();
        tails.end_words = ends.size();
        tails.labels = labels.data();
        tails.label_size = label_size;
        tails.num_labels = label_size > 0 ? labels.size() / label_size : 0;
        WholeTrie whole = without_gil([&] { return unfold_tails(stored, tails, num_nodes); });
        return nb::make_tuple(to_numpy(std::move(whole.louds)), to_numpy(std::move(whole.terminal)),
                              to_numpy(std::move(whole.label_low)), to_numpy(std::move(whole.high_flags)),
                              to_numpy(std::move(whole.label_high)));
      },
      nb::kw_only(), nb::arg("louds"), nb::arg("terminal"), nb::arg("label_low"), nb::arg("high_flags"),
      nb::arg("label_high"), nb::arg("high_width"), nb::arg("num_stored"), nb::arg("num_nodes"), nb::arg("num_links"),
      nb::arg("link_width"), nb::arg("link_flags"), nb::arg("links"), nb::arg("ends"), nb::arg("labels"),
      nb::arg("label_size"));
}

}  // namespace flashtrie
