"""The tests, a folder for each room. They import from the rooms and from `support`, never from each other."""
