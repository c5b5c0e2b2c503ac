//! Writes metrics whose values are read when they are requested.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;

/// Labels with their values.
pub(super) type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Writes one family after the other.
pub(super) struct Families<'a>(DescriptorEncoder<'a>);

impl<'a> Families<'a> {
    pub(super) const fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Begins a family. The library ends the help of registered metrics with a period, so this does, too.
    pub(super) fn begin<'b>(
        &'b mut self,
        name: &'b str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'b>, fmt::Error> {
        self.0.encode_descriptor(name, &format!("{help}."), None, kind)
    }

    pub(super) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        value: &impl EncodeGaugeValue,
    ) -> fmt::Result {
        self.begin(name, help, MetricType::Gauge)?.encode_gauge(value)
    }

    pub(super) fn counter(
        &mut self,
        name: &str,
        help: &str,
        value: &impl EncodeCounterValue,
    ) -> fmt::Result {
        counter(self.begin(name, help, MetricType::Counter)?, value)
    }

    /// Writes a gauge with one sample per item.
    pub(super) fn gauges<const N: usize, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        samples: Vec<(Labels<'_, N>, V)>,
    ) -> fmt::Result {
        let mut family = self.begin(name, help, MetricType::Gauge)?;
        for (labels, value) in samples {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// Writes a counter with one sample per item.
    pub(super) fn counters<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: Vec<(Labels<'_, N>, u64)>,
    ) -> fmt::Result {
        let mut family = self.begin(name, help, MetricType::Counter)?;
        for (labels, value) in samples {
            counter(family.encode_family(&labels)?, &value)?;
        }
        Ok(())
    }

    /// Writes one set of labels per item. The name of the samples ends with `_info`.
    pub(super) fn infos<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: Vec<Labels<'_, N>>,
    ) -> fmt::Result {
        let mut family = self.begin(name, help, MetricType::Info)?;
        for labels in samples {
            family.encode_info(&labels)?;
        }
        Ok(())
    }
}

fn counter(mut encoder: MetricEncoder<'_>, value: &impl EncodeCounterValue) -> fmt::Result {
    encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
}
