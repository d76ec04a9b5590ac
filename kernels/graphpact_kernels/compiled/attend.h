// Attention of ragged queries over the pages of their requests, on a CPU; the shared part of the kernels.
//
// A kernel turns its index tensors into a list of `Request`s. The work is split by request, key heads and a tile of
// rows (a row is one query with one of the query heads that share the key head). A tile walks over its keys in blocks
// of `kBlock`, with a running maximum and sum per row (FlashAttention, Dao et al. 2022). Keys and values are read in
// place from the cache; 16-bit ones are widened block by block. The result of a row does not depend on other
// requests, nor on the number of threads.
//
// Does not: know index tensors, or write the cache.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "sums.h"

namespace graphpact {

struct Request {
  int64_t begin;         // its first query, a row of q
  int64_t num_q;         // its queries
  const int32_t* pages;  // its page numbers
  int64_t num_keys;      // its last query is at the position of the last key
  int64_t seen;          // how many of the keys are attended: a plan may cover fewer
  const uint8_t* mask;   // num_q * num_keys bits, lowest first: which keys a query sees; or null
};

struct Options {
  int64_t page_size;
  double scaling;
  int64_t window;  // keys that a query sees, its own included; 0 for all
  double softcap;  // 0 for none
  bool causal;
};

constexpr int64_t kBlock = 64;  // keys in a block
constexpr int64_t kTile = 192;  // rows in a tile; it transposes a block of keys once for all of them
#ifdef CPU_CAPABILITY_AVX512
constexpr int64_t kMicro = 8;  // rows that are multiplied at once; with two vectors each, 16 of 32 registers
constexpr int64_t kSums = 16;  // products of a query and a key that are summed at once
#else
constexpr int64_t kMicro = 4, kSums = 8;  // 8 of 16
#endif
constexpr int64_t kFew = 8;                  // up to so many rows, keys are not transposed
constexpr int64_t kMacsPerThread = 1 << 16;  // the fewest multiplications for which a thread is used

inline bool is_few(int64_t rows) { return rows <= kFew; }

template <typename A>
constexpr A kNone = -std::numeric_limits<A>::infinity();

// Keys or values that are used next. They are fetched to the L2 cache in small parts, while others are used: a core can
// wait for few lines of memory at a time. All heads of a key are fetched together, since they are neighbours in memory:
// an EPYC (Zen 4) reads pieces of 768 bytes at 16 to 20 GB/s, and pieces of 256 bytes at 7.
struct Ahead {
  const char* memory;
  int64_t slot_bytes, head_bytes, bytes;  // from a slot or a head to the next, and of a head
  const int32_t* page;                    // of the next key
  int64_t offset, page_size, heads;
  int64_t keys;  // that are left to fetch
  int64_t each;  // parts that are fetched at a time
  int64_t head = 0;

  C10_ALWAYS_INLINE void fetch(int64_t times) {
    for (int64_t count = times * each; count > 0 && keys > 0; count--) {
      const char* at = memory + (*page * page_size + offset) * slot_bytes + head * head_bytes;
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
      if (++head < heads) continue;
      head = 0, keys--;
      if (++offset == page_size) page++, offset = 0;
    }
  }
};

// The memory of an item. Its thread keeps it, so that a step allocates nothing.
template <typename A>
struct Scratch {
  A *q, *out, *most, *sum;  // of the rows of the head that is attended
  A *scores, *keys, *turned, *values;
  const A* key[kBlock];
  const A* value[kBlock];
  Ahead next_keys{}, next_values{};

  Scratch(int64_t dim, int64_t v_dim) {
    const int64_t sizes[] = {kTile * dim,  kTile * v_dim,  kTile * kBlock, kBlock * dim,
                             kBlock * dim, kBlock * v_dim, kTile,          kTile};
    A** parts[] = {&first_q, &first_out, &scores, &keys, &turned, &values, &first_most, &first_sum};
    int64_t total = 0;
    for (auto size : sizes) total += size;
    static thread_local std::vector<A> memory;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    A* next = memory.data();
    for (int i = 0; i < 8; i++) {
      *parts[i] = next;
      next += sizes[i];
    }
    select(0, dim, v_dim);
  }

  // Attend to the rows from `row` on.
  void select(int64_t row, int64_t dim, int64_t v_dim) {
    q = first_q + row * dim, out = first_out + row * v_dim, most = first_most + row, sum = first_sum + row;
  }

 private:
  A *first_q, *first_out, *first_most, *first_sum;
};

// Copy `n` numbers, widened, from a row with the given stride.
template <typename T, typename A>
inline void widen(const T* from, int64_t stride, A* to, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, A>) {
    if (stride == 1) {
      std::copy_n(from, n, to);
      return;
    }
  } else {
    using Narrow = at::vec::Vectorized<T>;
    using Wide = at::vec::Vectorized<A>;
    if (stride == 1) {
      for (; i + Narrow::size() <= n; i += Narrow::size()) {
        auto [low, high] = at::vec::convert_to_float<T>(Narrow::loadu(from + i));
        low.store(to + i);
        high.store(to + i + Wide::size());
      }
    }
  }
  for (; i < n; i++) to[i] = static_cast<A>(from[i * stride]);
}

// scores[row][key] = q[row] . key, for `kRows` rows and the keys begin to end of a block, which are at any address.
template <typename A, int64_t kRows>
inline void dot_rows(Scratch<A>& s, int64_t row, int64_t begin, int64_t end, int64_t dim) {
  using Vec = at::vec::Vectorized<A>;
  constexpr int64_t kKeys = kSums / kRows;
  for (int64_t j = begin; j < end; j += kKeys) {
    const A* key[kKeys];
    for (int64_t i = 0; i < kKeys; i++) key[i] = s.key[std::min(j + i, end - 1)];
    s.next_keys.fetch(kKeys);
    Vec sums[kRows * kKeys];
    for (auto& sum : sums) sum = Vec(A(0));
    int64_t d = 0;
    for (; d + Vec::size() <= dim; d += Vec::size()) {
      Vec q[kRows];
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; r++) q[r] = Vec::loadu(s.q + (row + r) * dim + d);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kKeys; i++) {
        const Vec of = Vec::loadu(key[i] + d);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRows; r++) sums[r * kKeys + i] = at::vec::fmadd(q[r], of, sums[r * kKeys + i]);
      }
    }
    A totals[kRows * kKeys];
    sum_each(sums, totals);
    for (; d < dim; d++)
      for (int64_t i = 0; i < kRows * kKeys; i++) totals[i] += s.q[(row + i / kKeys) * dim + d] * key[i % kKeys][d];
    for (int64_t r = 0; r < kRows; r++)
      std::copy_n(totals + r * kKeys, std::min(kKeys, end - j), s.scores + (row + r) * kBlock + j);
  }
}

// scores[row][:end] = q[row] * turned, for `kRows` rows; turned is [dim][kBlock]. `end` is rounded up to whole vectors.
template <typename A, int64_t kRows>
inline void multiply_rows(const Scratch<A>& s, int64_t row, int64_t end, int64_t dim) {
  using Vec = at::vec::Vectorized<A>;
  constexpr int64_t kVecs = 2, kStep = kVecs * Vec::size();
  static_assert(kBlock % kStep == 0);
  for (int64_t j = 0; j < end; j += kStep) {
    Vec sums[kRows][kVecs];
    for (auto& of_row : sums)
      for (auto& sum : of_row) sum = Vec(A(0));
    for (int64_t d = 0; d < dim; d++) {
      Vec key[kVecs];
      for (int64_t v = 0; v < kVecs; v++) key[v] = Vec::loadu(s.turned + d * kBlock + j + v * Vec::size());
      for (int64_t r = 0; r < kRows; r++) {
        const Vec x(s.q[(row + r) * dim + d]);
        for (int64_t v = 0; v < kVecs; v++) sums[r][v] = at::vec::fmadd(x, key[v], sums[r][v]);
      }
    }
    for (int64_t r = 0; r < kRows; r++)
      for (int64_t v = 0; v < kVecs; v++) sums[r][v].store(s.scores + (row + r) * kBlock + j + v * Vec::size());
  }
}

// The same columns of `kRows` rows of out, from `c` on while there are `kVecs` vectors of them; see `add_values`.
template <typename A, int64_t kRows, int64_t kVecs>
inline void add_columns(Scratch<A>& s, int64_t row, int64_t begin, int64_t end, int64_t v_dim, int64_t& c) {
  using Vec = at::vec::Vectorized<A>;
  for (; c + kVecs * Vec::size() <= v_dim; c += kVecs * Vec::size()) {
    Vec sums[kRows][kVecs];
    for (int64_t r = 0; r < kRows; r++)
      for (int64_t v = 0; v < kVecs; v++) sums[r][v] = Vec::loadu(s.out + (row + r) * v_dim + c + v * Vec::size());
    for (int64_t j = begin; j < end; j++) {
      s.next_values.fetch(1);
      Vec value[kVecs];
      for (int64_t v = 0; v < kVecs; v++) value[v] = Vec::loadu(s.value[j] + c + v * Vec::size());
      for (int64_t r = 0; r < kRows; r++) {
        const Vec weight(s.scores[(row + r) * kBlock + j]);
        for (int64_t v = 0; v < kVecs; v++) sums[r][v] = at::vec::fmadd(weight, value[v], sums[r][v]);
      }
    }
    for (int64_t r = 0; r < kRows; r++)
      for (int64_t v = 0; v < kVecs; v++) sums[r][v].store(s.out + (row + r) * v_dim + c + v * Vec::size());
  }
}

// out[row] += scores[row] * values, for `kRows` rows and the keys begin to end of a block.
template <typename A, int64_t kRows>
inline void add_values(Scratch<A>& s, int64_t row, int64_t begin, int64_t end, int64_t v_dim) {
  int64_t c = 0;
  // With few rows more columns are added at once: the additions of a column wait for each other.
  if constexpr (kRows < 4 && std::is_same_v<A, float>) add_columns<A, kRows, kSums / 4>(s, row, begin, end, v_dim, c);
  add_columns<A, kRows, 2>(s, row, begin, end, v_dim, c);
  for (int64_t r = 0; r < kRows && c < v_dim; r++) {
    A* out = s.out + (row + r) * v_dim;
    for (int64_t j = begin; j < end; j++) {
      const A weight = s.scores[(row + r) * kBlock + j];
      for (int64_t rest = c; rest < v_dim; rest++) out[rest] += weight * s.value[j][rest];
    }
  }
}

// Call fn<kMicro>(row) for the rows, and fn<4>, fn<3>, fn<2> or fn<1> for those that are left over.
template <typename Fn>
inline void by_rows(int64_t rows, const Fn& fn) {
  int64_t row = 0;
  for (; row + kMicro <= rows; row += kMicro) fn(std::integral_constant<int64_t, kMicro>(), row);
  for (; row + 4 <= rows; row += 4) fn(std::integral_constant<int64_t, 4>(), row);
  switch (rows - row) {
    case 1: fn(std::integral_constant<int64_t, 1>(), row); break;
    case 2: fn(std::integral_constant<int64_t, 2>(), row); break;
    case 3: fn(std::integral_constant<int64_t, 3>(), row); break;
    default: break;
  }
}

// `count` rounded up to whole vectors.
template <typename A>
inline int64_t whole_vectors(int64_t count) {
  constexpr int64_t kSize = at::vec::Vectorized<A>::size();
  return (count + kSize - 1) / kSize * kSize;
}

// exp(x) for x <= 0, within 2 units in the last place. It is inlined, and the vectorized exp of torch is a call.
template <typename A>
inline at::vec::Vectorized<A> exp_of(at::vec::Vectorized<A> x) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (std::is_same_v<A, float>) {
    const __m512 low = _mm512_max_ps(_mm512_set1_ps(-200.f), x);  // -inf gives 0, and NaN stays NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(low, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), low);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.f / 720);
    for (const float factor : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
      sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, n);
  }
#endif
  return x.exp();
}

// Turn the first `end` scores, in whole vectors, into weights relative to the running maximum of their row, and scale
// the row's sums so far.
template <typename A>
inline void weigh(const Scratch<A>& s, int64_t row, int64_t end, int64_t v_dim) {
  using Vec = at::vec::Vectorized<A>;
  A* scores = s.scores + row * kBlock;
  if (end == 0) return;
  Vec block = Vec::loadu(scores);
  for (int64_t j = Vec::size(); j < end; j += Vec::size()) block = at::vec::maximum(block, Vec::loadu(scores + j));
  const A before = s.most[row];
  A most = at::vec::vec_reduce_all<A>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, block);
  most = before > most ? before : most;  // NaN if the block contains NaN
  if (most == kNone<A>) {                // no key was seen yet
    std::fill_n(scores, end, A(0));
    return;
  }
  const Vec reference(most);
  Vec sum(A(0));
  for (int64_t j = 0; j < end; j += Vec::size()) {
    const Vec weight = exp_of<A>(Vec::loadu(scores + j) - reference);
    weight.store(scores + j);
    sum = sum + weight;
  }
  const A total = at::vec::vec_reduce_all<A>([](Vec a, Vec b) { return a + b; }, sum);
  if (most == before) {
    s.sum[row] += total;
    return;
  }
  s.most[row] = most;
  if (before == kNone<A>) {
    s.sum[row] = total;
    return;
  }
  const A share = std::exp(before - most);
  s.sum[row] = s.sum[row] * share + total;
  A* out = s.out + row * v_dim;
  at::vec::map<A>([share](Vec x) { return x * Vec(share); }, out, out, v_dim);
}

// The widths of a call, and how many query heads share a key head.
struct Shape {
  int64_t dim, v_dim, group;
  Options options;
};

// The rows `first` to `first + rows` of a request, for one key head.
struct Tile {
  const Request& request;
  const Shape& shape;
  int64_t first, rows;

  // The keys that row `r` of the tile sees by its position: from `from(r)` to `to(r)`.
  int64_t from(int64_t r) const {
    const int64_t window = shape.options.window;
    return by_position() && window > 0 ? std::max<int64_t>(0, position(r) - window + 1) : 0;
  }
  int64_t to(int64_t r) const {
    return by_position() && shape.options.causal ? std::min(position(r) + 1, request.seen) : request.seen;
  }

 private:
  bool by_position() const { return request.mask == nullptr; }
  int64_t position(int64_t r) const { return request.num_keys - request.num_q + (first + r) / shape.group; }
};

// Attend to the keys `begin` to `end` of the block at key `at`. This part does not depend on the type of the tensors,
// so it is compiled only twice.
template <typename A>
void attend_block(Scratch<A>& s, const Tile& tile, int64_t at, int64_t begin, int64_t end, bool turns) {
  const Request& request = tile.request;
  const int64_t rows = tile.rows, dim = tile.shape.dim, v_dim = tile.shape.v_dim;
  // Where the keys end that a row of `count` rows sees. The last one sees the most.
  const auto last = [&](int64_t row, int64_t count) {
    return std::clamp<int64_t>(tile.to(row + count - 1) - at, begin, end);
  };
  if (turns) {
    by_rows(rows, [&](auto count, int64_t row) { multiply_rows<A, count()>(s, row, last(row, count()), dim); });
  } else {
    by_rows(rows, [&](auto count, int64_t row) {
      if constexpr (std::is_same_v<A, float>) {
        dot_rows<A, count()>(s, row, begin, end, dim);
      } else {
        for (int64_t r = 0; r < count(); r++) dot_rows<A, 1>(s, row + r, begin, end, dim);
      }
    });
  }
  for (int64_t r = 0; r < rows; r++) {
    A* scores = s.scores + r * kBlock;
    if (tile.shape.options.softcap != 0) {
      const A cap = static_cast<A>(tile.shape.options.softcap);
      for (int64_t j = begin; j < end; j++) scores[j] = cap * std::tanh(scores[j] / cap);
    }
    const int64_t low = std::max<int64_t>(begin, tile.from(r) - at), high = std::min(end, tile.to(r) - at);
    std::fill(scores, scores + std::clamp<int64_t>(low, 0, kBlock), kNone<A>);
    const int64_t seen = std::clamp<int64_t>(high, 0, kBlock), whole = whole_vectors<A>(seen);
    std::fill(scores + seen, scores + whole, kNone<A>);
    std::fill(scores + whole, scores + kBlock, A(0));
    if (request.mask != nullptr) {
      const int64_t bits = (tile.first + r) / tile.shape.group * request.num_keys + at;
      for (int64_t j = low; j < high; j++)
        if (!(request.mask[(bits + j) / 8] >> ((bits + j) % 8) & 1)) scores[j] = kNone<A>;
    }
    weigh(s, r, whole, v_dim);
  }
  by_rows(rows, [&](auto count, int64_t row) { add_values<A, count()>(s, row, begin, last(row, count()), v_dim); });
}

// What a thread does at once: `rows` rows of a request from row `first` on, for `heads` key heads from `head` on. There
// are several heads only for few rows.
struct Item {
  const Request& request;
  int64_t head, heads, first, rows;
};

// The tensors of a call, with their strides.
template <typename T, typename A>
struct Call {
  const T *q, *k, *v;
  T* out;
  A* lse;          // null to skip it
  const A* sinks;  // null for none
  int64_t q_row, q_head, k_slot, k_head, k_last, v_slot, v_head, v_last, out_row, out_head, lse_row, lse_head;
  Shape shape;

  // Attend for an item. Meanwhile the first keys and values of `next` are fetched, unless it is null.
  void attend(const Item& item, const Item* next) const {
    const auto [request, head, heads, first, rows] = item;
    const auto [dim, v_dim, group, options] = shape;
    Scratch<A> s(dim, v_dim);
    for (int64_t r = 0; r < heads * rows; r++) {
      const int64_t row = first + r % rows, its_head = (head + r / rows) * group + row % group;
      widen(q + (request.begin + row / group) * q_row + its_head * q_head, 1, s.q + r * dim, dim);
    }
    const at::vec::Vectorized<A> scaling(A(options.scaling));
    at::vec::map<A>([scaling](at::vec::Vectorized<A> x) { return x * scaling; }, s.q, s.q, heads * rows * dim);
    std::fill_n(s.out, heads * rows * v_dim, A(0));
    std::fill_n(s.most, heads * rows, kNone<A>);
    std::fill_n(s.sum, heads * rows, A(0));
    const Tile tile{request, shape, first, rows};
    const int64_t lowest = tile.from(0), highest = tile.to(rows - 1);
    const bool turns = !is_few(rows);
    for (int64_t at = lowest / kBlock * kBlock; at < highest; at += kBlock) {
      const int64_t begin = std::max<int64_t>(0, lowest - at), end = std::min(kBlock, highest - at);
      const bool is_last = at + kBlock >= highest;
      const Item* following = is_last ? next : &item;
      if (!turns && following != nullptr) look_ahead(s, *following, is_last ? 0 : at + kBlock, heads * (end - begin));
      for (int64_t h = 0; h < heads; h++) {
        s.select(h * rows, dim, v_dim);
        fetch(request, head + h, at, begin, end, turns, s);
        attend_block(s, tile, at, begin, end, turns);
      }
    }
    for (int64_t h = 0; h < heads; h++) {
      s.select(h * rows, dim, v_dim);
      for (int64_t r = 0; r < rows; r++) write(request, head + h, first + r, r, s);
    }
  }

 private:
  // Have the first block of an item fetched that has keys from `at` on, while `used` keys of single heads are used.
  void look_ahead(Scratch<A>& s, const Item& item, int64_t at, int64_t used) const {
    const Tile tile{item.request, shape, item.first, item.rows};
    const int64_t begin = std::max(at, tile.from(0)), size = shape.options.page_size;
    const int64_t end = std::min(begin / kBlock * kBlock + kBlock, tile.to(item.rows - 1));
    constexpr int64_t kBytes = sizeof(T);
    Ahead keys{
        .memory = reinterpret_cast<const char*>(k + item.head * k_head),
        .slot_bytes = k_slot * kBytes,
        .head_bytes = k_head * kBytes,
        .bytes = shape.dim * kBytes,
        .page = item.request.pages + begin / size,
        .offset = begin % size,
        .page_size = size,
        .heads = item.heads,
        .keys = end - begin,
        .each = ((end - begin) * item.heads + used - 1) / used,
    };
    s.next_keys = keys;
    keys.memory = reinterpret_cast<const char*>(v + item.head * v_head);
    keys.slot_bytes = v_slot * kBytes, keys.head_bytes = v_head * kBytes, keys.bytes = shape.v_dim * kBytes;
    s.next_values = keys;
  }

  // Find the keys and values of a block, widened if they are narrow; transpose the keys if rows share them.
  void fetch(const Request& request, int64_t head, int64_t at, int64_t begin, int64_t end, bool turns,
             Scratch<A>& s) const {
    const int64_t dim = shape.dim, v_dim = shape.v_dim, size = shape.options.page_size;
    int64_t page = (at + begin) / size, offset = (at + begin) % size;
    for (int64_t j = begin; j < end; j++, offset++) {
      if (offset == size) page++, offset = 0;
      const int64_t slot = request.pages[page] * size + offset;
      const T* k_at = k + slot * k_slot + head * k_head;
      const T* v_at = v + slot * v_slot + head * v_head;
      bool copies_k = true, copies_v = true;
      if constexpr (std::is_same_v<T, A>) {
        copies_k = turns || k_last != 1, copies_v = v_last != 1;
        if (!copies_k) s.key[j] = k_at;
        if (!copies_v) s.value[j] = v_at;
      }
      if (copies_k) {
        widen(k_at, k_last, s.keys + j * dim, dim);
        s.key[j] = s.keys + j * dim;
      }
      if (copies_v) {
        widen(v_at, v_last, s.values + j * v_dim, v_dim);
        s.value[j] = s.values + j * v_dim;
      }
    }
    if (!turns) return;
    // Columns without a key contain any number. They are multiplied too, and then masked.
    if constexpr (std::is_same_v<A, float>) {
      at::vec::transpose_mxn<float>(s.keys + begin * dim, dim, s.turned + begin, kBlock, end - begin, dim);
    } else {
      for (int64_t j = begin; j < end; j++)
        for (int64_t d = 0; d < dim; d++) s.turned[d * kBlock + j] = s.key[j][d];
    }
  }

  // Write the result of a row, or zeros if it saw no key.
  void write(const Request& request, int64_t head, int64_t row, int64_t r, const Scratch<A>& s) const {
    const int64_t v_dim = shape.v_dim, group = shape.group;
    const int64_t query = request.begin + row / group, its_head = head * group + row % group;
    A most = s.most[r], sum = s.sum[r], share = 1;
    if (sinks != nullptr && std::max(most, sinks[its_head]) != kNone<A>) {  // a key without value
      const A sink = sinks[its_head], larger = std::max(most, sink);
      share = std::exp(most - larger);
      sum = sum * share + std::exp(sink - larger);
      most = larger;
    }
    const A factor = sum == 0 ? A(0) : share / sum;
    T* to = out + query * out_row + its_head * out_head;
    for (int64_t c = 0; c < v_dim; c++) to[c] = static_cast<T>(s.out[r * v_dim + c] * factor);
    if (lse != nullptr) lse[query * lse_row + its_head * lse_head] = sum == 0 ? kNone<A> : most + std::log(sum);
  }
};

// Attend for all requests. Rows of `out` that belong to no request are not written.
template <typename T>
void attend_all(const std::vector<Request>& requests, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const std::optional<at::Tensor>& sinks, const Options& options, at::Tensor& out,
                const std::optional<at::Tensor>& lse) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const int64_t kv_heads = k.size(1);
  const Call<T, A> call{
      .q = q.const_data_ptr<T>(),
      .k = k.const_data_ptr<T>(),
      .v = v.const_data_ptr<T>(),
      .out = out.mutable_data_ptr<T>(),
      .lse = lse ? lse->mutable_data_ptr<A>() : nullptr,
      .sinks = sinks ? sinks->const_data_ptr<A>() : nullptr,
      .q_row = q.stride(0),
      .q_head = q.stride(1),
      .k_slot = k.stride(0),
      .k_head = k.stride(1),
      .k_last = k.stride(2),
      .v_slot = v.stride(0),
      .v_head = v.stride(1),
      .v_last = v.stride(2),
      .out_row = out.stride(0),
      .out_head = out.stride(1),
      .lse_row = lse ? lse->stride(0) : 0,
      .lse_head = lse ? lse->stride(1) : 0,
      .shape = {q.size(2), v.size(2), q.size(1) / kv_heads, options},
  };
  static thread_local std::vector<Item> items;  // its memory is kept, so that a step allocates nothing
  items.clear();
  int64_t macs = 0;
  // An item with few rows has several heads, but each thread gets an item.
  const int64_t bs = std::max<int64_t>(1, requests.size()), shares = (at::get_num_threads() + bs - 1) / bs;
  const int64_t most_heads = (kv_heads + shares - 1) / shares;
  for (size_t i = 0; i < requests.size(); i++) {
    const int64_t rows = requests[i].num_q * call.shape.group;
    macs += rows * kv_heads * requests[i].num_keys * (q.size(2) + v.size(2));
    const int64_t heads = is_few(rows) ? std::clamp<int64_t>(most_heads, 1, kTile / std::max<int64_t>(1, rows)) : 1;
    for (int64_t first = 0; first < rows; first += kTile)
      for (int64_t head = 0; head < kv_heads; head += heads)
        items.push_back({requests[i], head, std::min(heads, kv_heads - head), first, std::min(kTile, rows - first)});
  }
  const int64_t count = static_cast<int64_t>(items.size());
  const Item* item = items.data();
  const auto run = [&call, item](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) call.attend(item[i], i + 1 < end ? item + i + 1 : nullptr);
  };
  if (macs <= kMacsPerThread) {
    run(0, count);
  } else {
    at::parallel_for(0, count, std::max<int64_t>(1, count * kMacsPerThread / macs), run);
  }
}

}  // namespace graphpact
