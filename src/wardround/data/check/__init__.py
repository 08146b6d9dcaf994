"""`wardround data check`: a data set looked at as a careful person would, before anybody trains on it."""
