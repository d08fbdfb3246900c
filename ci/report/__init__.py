"""Reports: data first, then text, pages and XML made from that data alone. A figure that is in one is in
all."""
