#include "draft.hpp"

#include <algorithm>
#include <deque>
#include <vector>

#include "draft_scan.hpp"
#include "draft_tree.hpp"
#include "threads.hpp"

namespace flashtrie {
namespace {

size_t logit_bytes(LogitType type) { return type == kFloat32 ? 4 : 2; }

const char* row_at(const DraftSizes& sizes, const void* logits, int64_t batch, int64_t depth) {
  const int64_t row = batch * sizes.block_size + sizes.first_row + depth;
  return static_cast<const char*>(logits) +
         row * sizes.vocab_size * static_cast<int64_t>(logit_bytes(static_cast<LogitType>(sizes.logit_type)));
}

float logit_at(const char* row, LogitType type, uint32_t token) {
  if (type == kFloat32) return reinterpret_cast<const float*>(row)[token];
  return widen(reinterpret_cast<const uint16_t*>(row)[token], type);
}

// What one row of logits says on its own.
struct RowFacts {
  float lse;
  bool is_bad;
  int32_t count;  // candidates
};

// A legal token: the drafter's id for it, and its number among the node's legal tokens.
struct LegalId {
  uint32_t id, number;
  bool operator<(const LegalId& other) const { return id < other.id; }
};

struct Scratch {
  LogitScan scan;
  DraftTree tree;
  std::vector<LegalId> legal;
  std::vector<float> values;
  std::deque<std::vector<DraftCandidate>> lists;  // one for each node of a constrained tree; addresses stay
};

template <typename Rules>
class Build {
 public:
  Build(const DraftSizes& sizes, const DraftInputs& inputs, const DraftConstraint<Rules>* constraint,
        const DraftOutputs& outputs)
      : sizes_(sizes), inputs_(inputs), constraint_(constraint), outputs_(outputs) {}

  void run(int num_threads) {
    num_threads = std::max(num_threads, 1);
    std::vector<Scratch> scratch;
    for (int i = 0; i < num_threads; ++i) scratch.push_back({{}, DraftTree(sizes_), {}, {}, {}});
    rows_.resize(static_cast<size_t>(sizes_.batch_size * sizes_.num_depths()));
    if (!constraint_) candidates_.resize(rows_.size() * static_cast<size_t>(sizes_.top_k));
    if (!constraint_ || !constraint_->renormalise)
      parallel_for(rows_.size(), 1, num_threads, [&](int worker, uint64_t row, uint64_t) {
        scan_row(scratch[static_cast<size_t>(worker)], static_cast<int64_t>(row));
      });
    parallel_for(static_cast<uint64_t>(sizes_.batch_size), 1, num_threads, [&](int worker, uint64_t batch, uint64_t) {
      grow(scratch[static_cast<size_t>(worker)], static_cast<int64_t>(batch));
    });
  }

 private:
  LogitType type() const { return static_cast<LogitType>(sizes_.logit_type); }

  void scan_row(Scratch& scratch, int64_t row) {
    const int64_t depths = sizes_.num_depths();
    LogitScan& scan = scratch.scan;
    scan.clear(constraint_ ? 0 : sizes_.top_k);
    scan.feed_raw(row_at(sizes_, inputs_.logits, row / depths, row % depths), sizes_.vocab_size, type());
    RowFacts facts{scan.log_sum_exp(), scan.is_bad(), 0};
    if (!constraint_ && !facts.is_bad) {
      DraftCandidate* kept = candidates_.data() + row * sizes_.top_k;
      for (const ScannedValue& value : scan.take_best())
        kept[facts.count++] = {child_log_prob(value.logit, facts.lse), value.position, kNoNode};
    }
    rows_[static_cast<size_t>(row)] = facts;
  }

  void grow(Scratch& scratch, int64_t batch) {
    const int64_t first = batch * sizes_.num_depths();
    bool is_bad = false;
    for (int64_t row = first; row < first + sizes_.num_depths(); ++row)
      is_bad |= rows_[static_cast<size_t>(row)].is_bad;
    if (constraint_) {
      const uint32_t start = constraint_->start_states ? constraint_->start_states[batch] : 0;
      scratch.lists.clear();
      scratch.tree.grow(inputs_.roots[batch], start, [&](const DraftNode& node) {
        return legal_offers(scratch, batch, node, is_bad);
      });
    } else {
      scratch.tree.grow(inputs_.roots[batch], kNoNode, [&](const DraftNode& node) {
        const int64_t row = first + node.depth;
        return DraftOffers{candidates_.data() + row * sizes_.top_k, rows_[static_cast<size_t>(row)].count,
                           sizes_.vocab_size > sizes_.top_k};
      });
    }
    scratch.tree.write(outputs_, batch, inputs_.base_lengths[batch], inputs_.vocab_map,
                       is_bad ? kDraftBadRow : 0);
  }

  // The logits of all legal tokens, whatever their number: none is lost to top_k.
  DraftOffers legal_offers(Scratch& scratch, int64_t batch, const DraftNode& node, bool& is_bad) {
    const Rules& rules = constraint_->rules;
    const RowFacts& facts = rows_[static_cast<size_t>(batch * sizes_.num_depths() + node.depth)];
    if (!constraint_->renormalise && facts.is_bad) return {};
    const typename Rules::Legal legal = rules.legal(node.state);
    list_ids(rules, legal, scratch.legal);
    const char* row = row_at(sizes_, inputs_.logits, batch, node.depth);
    scratch.values.clear();
    for (const LegalId& token : scratch.legal) scratch.values.push_back(logit_at(row, type(), token.id));
    LogitScan& scan = scratch.scan;
    scan.clear(sizes_.top_k);
    scan.feed(scratch.values.data(), static_cast<int64_t>(scratch.values.size()));
    if (scan.is_bad()) {
      is_bad = true;
      return {};
    }
    const float lse = constraint_->renormalise ? scan.log_sum_exp() : facts.lse;
    std::vector<DraftCandidate>& kept = scratch.lists.emplace_back();
    for (const ScannedValue& value : scan.take_best()) {
      const LegalId& token = scratch.legal[value.position];
      kept.push_back({child_log_prob(value.logit, lse), token.id, rules.state(legal, token.number)});
    }
    const bool has_more = scan.num_finite() > static_cast<uint32_t>(sizes_.top_k);
    return {kept.data(), static_cast<int32_t>(kept.size()), has_more};
  }

  // The legal tokens that the drafter knows, by ascending id, so that ties go to the lower one.
  void list_ids(const Rules& rules, const typename Rules::Legal& legal, std::vector<LegalId>& ids) const {
    ids.clear();
    for (uint32_t number = 0; number < legal.count(); ++number) {
      const uint32_t id = constraint_->ids(rules.token(legal, number));
      if (id < static_cast<uint32_t>(sizes_.vocab_size)) ids.push_back({id, number});
    }
    // Mostly in order, but for end tokens behind the others.
    const auto unsorted = std::is_sorted_until(ids.begin(), ids.end());
    std::sort(unsorted, ids.end());
    std::inplace_merge(ids.begin(), unsorted, ids.end());
  }

  const DraftSizes& sizes_;
  const DraftInputs& inputs_;
  const DraftConstraint<Rules>* constraint_;
  const DraftOutputs& outputs_;
  std::vector<RowFacts> rows_;              // [B, num_depths]
  std::vector<DraftCandidate> candidates_;  // [B, num_depths, top_k], without a constraint
};

}  // namespace

void build_draft_trees(const DraftSizes& sizes, const DraftInputs& inputs, const DraftOutputs& outputs,
                       int num_threads) {
  Build<TrieRules>(sizes, inputs, nullptr, outputs).run(num_threads);
}

template <typename Rules>
void build_held_draft_trees(const DraftSizes& sizes, const DraftInputs& inputs, const DraftConstraint<Rules>& constraint,
                            const DraftOutputs& outputs, int num_threads) {
  Build<Rules>(sizes, inputs, &constraint, outputs).run(num_threads);
}

template void build_held_draft_trees(const DraftSizes&, const DraftInputs&, const DraftConstraint<TrieRules>&,
                                     const DraftOutputs&, int);
template void build_held_draft_trees(const DraftSizes&, const DraftInputs&, const DraftConstraint<MaskRules>&,
                                     const DraftOutputs&, int);

}  // namespace flashtrie
