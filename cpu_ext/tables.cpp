// Puts the tables together from the units: what a unit lacks comes from the next simpler one.
#include "tables.h"

namespace hetero {
namespace {

IsaTable over(const char* name, const IsaTable& base, const IsaTable* unit) {
  IsaTable table = base;
  table.name = name;
  if (unit == nullptr) return table;
  for (int f = 0; f < kFormats; f++)
    for (int c = 0; c < kRowClasses; c++)
      if (unit->gemm[f][c].fn != nullptr) table.gemm[f][c] = unit->gemm[f][c];
  if (unit->act != nullptr) table.act = unit->act;
  if (unit->quantize != nullptr) table.quantize = unit->quantize;
  if (unit->axpy != nullptr) table.axpy = unit->axpy;
  if (unit->round != nullptr) table.round = unit->round;
  return table;
}

}  // namespace

const IsaTable* avx512_table(bool vnni, bool bf16) {
  if (avx512_plain_unit() == nullptr) return nullptr;
  static const IsaTable plain = over("avx512", *avx512_plain_unit(), nullptr);
  static const IsaTable with_vnni = over("avx512", plain, avx512_vnni_unit());
  static const IsaTable with_bf16 = over("avx512", plain, avx512_bf16_unit());
  static const IsaTable with_both = over("avx512", with_vnni, avx512_bf16_unit());
  return vnni ? (bf16 ? &with_both : &with_vnni) : (bf16 ? &with_bf16 : &plain);
}

const IsaTable* amx_table() {
  if (amx_unit() == nullptr || avx512_table(true, true) == nullptr) return nullptr;
  static const IsaTable table = over("amx", *avx512_table(true, true), amx_unit());
  return &table;
}

const IsaTable* amx_twin_table() {
  static const IsaTable table = over("amx_twin", *scalar_table(), amx_twin_unit());
  return &table;
}

}  // namespace hetero
