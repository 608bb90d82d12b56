"""Paths of users, and one set of functions for local files and objects behind URLs."""
