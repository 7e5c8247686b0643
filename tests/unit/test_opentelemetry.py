"""Our spans as OpenTelemetry's: parents, times and fields, in any thread."""

from __future__ import annotations

import threading

import pytest

from piecework.events import Phase, RecordHit, phase
from piecework.span_events import sub_phase
from piecework.spans import carry

pytest.importorskip("opentelemetry.sdk", reason="it comes with `piecework[otel]`")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from piecework.diagnostics.opentelemetry import OpenTelemetrySpans


def test_spans_keep_their_parents_times_and_fields() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observe = OpenTelemetrySpans(provider)

    def elsewhere() -> None:
        with sub_phase("C++", "g++ kernels.so"):
            observe(RecordHit(key="k1"))

    with phase(observe, "compile", "2 artifacts"):
        thread = threading.Thread(target=carry(elsewhere))
        thread.start()
        thread.join()
        with sub_phase("Inductor"), sub_phase("GraphLowering.run"):
            assert exporter.get_finished_spans() == ()
    observe(RecordHit(key="alone"))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"compile", "C++", "Inductor", "GraphLowering.run"}
    ids = {name: span.context.span_id for name, span in spans.items()}
    assert spans["compile"].parent is None
    assert spans["C++"].parent.span_id == spans["Inductor"].parent.span_id == ids["compile"]
    assert spans["GraphLowering.run"].parent.span_id == ids["Inductor"]
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert dict(spans["compile"].attributes)["piecework.detail"] == "2 artifacts"
    assert spans["C++"].attributes["thread.id"] != spans["compile"].attributes["thread.id"]
    assert [event.name for event in spans["C++"].events] == ["RecordHit"]
    assert spans["compile"].start_time <= spans["Inductor"].start_time <= spans["Inductor"].end_time
    assert spans["Inductor"].end_time <= spans["compile"].end_time


def test_times_are_those_of_the_events() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    OpenTelemetrySpans(provider)(Phase(name="trace", start_ns=10, end_ns=1_000_010))
    (span,) = exporter.get_finished_spans()
    assert span.end_time - span.start_time == 1_000_000
