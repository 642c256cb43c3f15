// Pairs of bfloat16 in 32-bit lanes on Arm: rounded to, and multiplied. Included inside an anonymous
// namespace.

// Lane i is a[i] below b[i], rounded to nearest even.
PA_INLINE vu bf16_pairs(vf a, vf b) {
#if defined(PA_SVE)
  const svbool_t all = svptrue_b32();
  svbfloat16_t low = svcvt_bf16_f32_x(all, (svfloat32_t)a);
  return (vu)svreinterpret_u32_bf16(svcvtnt_bf16_f32_m(low, all, (svfloat32_t)b));
#else
  uint16x4_t low = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)a));
  uint16x4_t high = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)b));
  return (vu)vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
#endif
}

// acc plus, lane by lane, the two products of the pair `a` with that lane's of `b`.
PA_INLINE vf dot_pairs(vf acc, uint32_t a, vu b) {
#if defined(PA_SVE)
  return (vf)svbfdot_f32((svfloat32_t)acc, svreinterpret_bf16_u32(svdup_n_u32(a)),
                         svreinterpret_bf16_u32((svuint32_t)b));
#else
  return (vf)vbfdotq_f32((float32x4_t)acc, vreinterpretq_bf16_u32(vdupq_n_u32(a)),
                         vreinterpretq_bf16_u32((uint32x4_t)b));
#endif
}
