// The Python face of the hand-off and its twin. Memory arrives as addresses that the caller keeps alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "handoff.h"
#include "twin.h"

namespace nb = nanobind;

void bind_handoff(nb::module_& m) {
  using namespace hetero;
  using Times = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

  nb::class_<ChannelLayout>(m, "ChannelLayout")
      .def(
          "__init__",
          [](ChannelLayout* self, int64_t lanes, int64_t layers, int64_t rows, int64_t slots, int64_t hidden,
             int64_t depth, int32_t type, bool wide) {
            new (self)
                ChannelLayout{lanes, layers, rows, slots, hidden, depth, static_cast<DType>(type), wide};
          },
          nb::arg("lanes"), nb::arg("layers"), nb::arg("rows"), nb::arg("slots"), nb::arg("hidden"),
          nb::arg("depth"), nb::arg("type"), nb::arg("wide"))
      .def_prop_ro("nbytes", &ChannelLayout::bytes)
      .def("submit", &ChannelLayout::submit)
      .def("done", &ChannelLayout::done)
      .def("fault", &ChannelLayout::fault)
      .def("ids", &ChannelLayout::ids)
      .def("weights", &ChannelLayout::weights)
      .def("x", &ChannelLayout::x)
      .def("result", &ChannelLayout::result);

  nb::class_<Channel>(m, "Channel")
      .def(
          "__init__",
          [](Channel* self, uintptr_t memory, const ChannelLayout& layout,
             const std::vector<const Experts*>& experts, int64_t limit_ns, bool defer) {
            new (self) Channel(reinterpret_cast<uint8_t*>(memory), layout, experts, limit_ns, defer);
          },
          nb::arg("memory"), nb::arg("layout"), nb::arg("experts"), nb::arg("limit_ns"),
          nb::arg("defer") = false)
      .def("begin", &Channel::begin, nb::call_guard<nb::gil_scoped_release>())
      .def("end", &Channel::end, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Channel::close, nb::call_guard<nb::gil_scoped_release>())
      .def("times",
           [](const Channel& c, int64_t lane) {
             std::vector<Times> all;
             for (const LayerTimes& t : c.times(lane))
               all.emplace_back(t.looked, t.seen, t.began, t.ended, t.published, t.experts, t.later_began,
                                t.later_ended, t.later_experts);
             return all;
           })
      .def("inject",
           [](Channel& c, int32_t point, int32_t kind, int64_t lane, int64_t layer, int64_t ns) {
             c.inject(static_cast<Point>(point), static_cast<FaultKind>(kind), lane, layer, ns);
           })
      .def("jitter", &Channel::jitter)
      .def_prop_ro("workers", &Channel::workers);

  nb::class_<Twin>(m, "Twin")
      .def(nb::init<>())
      .def("copy",
           [](Twin& t, uintptr_t to, uintptr_t from, int64_t bytes) {
             t.copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
           })
      .def("write",
           [](Twin& t, uintptr_t flag, uint32_t value) { t.write(reinterpret_cast<void*>(flag), value); })
      .def("wait",
           [](Twin& t, uintptr_t flag, uint32_t value) { t.wait(reinterpret_cast<void*>(flag), value); })
      .def("pause", &Twin::pause)
      .def("jitter", &Twin::jitter)
      .def("launch", &Twin::launch, nb::call_guard<nb::gil_scoped_release>())
      .def("synchronize", &Twin::synchronize, nb::call_guard<nb::gil_scoped_release>())
      .def("abort", &Twin::abort)
      .def_prop_ro("last_ns", &Twin::last_ns);

  m.attr("host_submit") = reinterpret_cast<uintptr_t>(&host_submit);
  m.attr("host_collect") = reinterpret_cast<uintptr_t>(&host_collect);
  m.def("host_call", [](uintptr_t function, uintptr_t flag) {
    nb::gil_scoped_release release;
    reinterpret_cast<void (*)(void*)>(function)(reinterpret_cast<void*>(flag));
  });
}
