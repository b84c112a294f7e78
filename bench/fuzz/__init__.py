"""Damaged inputs of every kind, each of which has to give an answer or an error of qoff's."""
