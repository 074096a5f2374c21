"""Parts of the job migrate: the forecast of another encoder, and the gate before a switch to it.

migrate_options   options of `migrate`
both_encoders     opens the old embeddings and the new encoder
forecasting       makes the forecast
forecast_report   the forecast as lines, JSON values and a page
cluster_cost      estimates time and price of a whole new encoding on a cluster
saved_map         saves the map of queries with the new encoder as a model of the store
gating            compares the old and the new embeddings, and makes the new release live
"""
