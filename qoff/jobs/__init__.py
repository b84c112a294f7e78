"""A file of requests, answered so that nothing is lost and nothing is done twice."""
