"""What was done with a module, as a page, a text and JSON."""

from onnxtrain.report.graphs import GraphReport, graph_report
from onnxtrain.report.run import RunReport

__all__ = ["GraphReport", "RunReport", "graph_report"]
