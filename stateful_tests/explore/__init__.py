"""Every state of a small scope, every transition as a tour for an implementation. Random choices have no
place here: equal scopes give equal counts."""
