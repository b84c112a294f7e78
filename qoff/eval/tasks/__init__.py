"""Tasks of lm-evaluation-harness on a qoff model."""
