"""Steps: the tensors of a module and its optimizer on a runtime, the captured passes of a module, and their submission as a step."""
