// The sums of the numbers of vectors, several vectors at once.
//
// Does not: add vectors to each other.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <type_traits>

namespace graphpact {

#ifdef CPU_CAPABILITY_AVX512
// The sums of the numbers of 16 vectors, in one vector: a tree of 15 additions, of equal depth for each vector.
inline __m512 sums_of(const __m512 (&v)[16]) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x44), _mm512_shuffle_f32x4(b[0], b[1], 0xEE));
  const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x44), _mm512_shuffle_f32x4(b[2], b[3], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
}
#endif

// sums[i] = the sum of the numbers of parts[i]. The order of the additions is the same for each.
template <typename A, int64_t N>
inline void sum_each(const at::vec::Vectorized<A> (&parts)[N], A (&sums)[N]) {
  using Vec = at::vec::Vectorized<A>;
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (std::is_same_v<A, float>) {
    for (int64_t at = 0; at < N; at += 16) {
      __m512 group[16];
      for (int64_t i = 0; i < 16; i++) group[i] = at + i < N ? __m512(parts[at + i]) : _mm512_setzero_ps();
      Vec(sums_of(group)).store(sums + at, std::min<int64_t>(16, N - at));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < N; i++) sums[i] = at::vec::vec_reduce_all<A>([](Vec a, Vec b) { return a + b; }, parts[i]);
}

}  // namespace graphpact
