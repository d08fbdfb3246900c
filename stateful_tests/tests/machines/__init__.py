"""The machines, the pytest plugin and the package `kvspec`, as a stranger uses them."""
