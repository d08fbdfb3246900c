"""How the files of a release or of a checkout are found, recognized, and loaded without a server.

In the order of a load:
fetch: the folder of a release, from the cache or the package index.
wheel_parts: some files of a large wheel.
nearest: the release that a checkout is nearest to, by the lines of its files (sketches/).
probe: the names of an API that a tree has.
parts: the parts of the API that it is driven with.
used_names: names that an adapter gives and a tree has lost.
copied_rules: rules that a tree has otherwise.
renamed: names that a release has changed.
optional: reads of attributes that not every release has.
isolation: the import hook that loads the bookkeeping alone.
function_cuts: functions cut out of a file.
"""
