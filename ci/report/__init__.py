"""Reports: data first, then text, pages and XML made from that data alone. A figure that is in one is in
all."""

# Of a trace: which schedulers and which clients can bring it about.
FAITHFUL = "possible in a real scheduler"
FREE_ONLY = "seen only with --mode free, which also drives what no real scheduler does"
PATIENT = "clients wait for each answer"
IMPATIENT = "a client does not wait (a turn while one runs, or tokens taken back)"
