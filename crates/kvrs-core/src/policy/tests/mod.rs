//! Policies by name and settings, as a reader of plans makes them.

mod kept;
mod spec;

use super::*;
use serde::de::value::{Error as ReadError, MapDeserializer};
use serde::de::{Deserialize, Deserializer, IntoDeserializer, Visitor};

/// A tree of settings, as a JSON reader would hand it over.
#[derive(Debug, Clone)]
enum Json {
    Int(i64),
    Float(f64),
    Text(&'static str),
    Map(Vec<(&'static str, Json)>),
}

use Json::{Float, Int, Map, Text};

impl<'de> Deserializer<'de> for Json {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, ReadError> {
        match self {
            Int(x) if x >= 0 => visitor.visit_u64(x as u64),
            Int(x) => visitor.visit_i64(x),
            Float(x) => visitor.visit_f64(x),
            Text(x) => visitor.visit_str(x),
            Map(x) => MapDeserializer::new(x.into_iter()).deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, ReadError> {
        match self {
            Text(x) => visitor.visit_enum(IntoDeserializer::<ReadError>::into_deserializer(x)),
            Map(x) => visitor.visit_enum(serde::de::value::MapAccessDeserializer::new(MapDeserializer::new(
                x.into_iter(),
            ))),
            _ => self.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, ReadError> for Json {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

fn json(name: &'static str, params: Vec<(&'static str, Json)>) -> Json {
    Map(vec![("name", Text(name)), ("params", Map(params))])
}

fn read(json: Json) -> std::result::Result<PolicySpec, ReadError> {
    PolicySpec::deserialize(json)
}

/// A policy by name and settings.
fn policy(name: &'static str, params: Vec<(&'static str, Json)>) -> PolicySpec {
    read(json(name, params)).unwrap()
}

fn budget(n: i64) -> (&'static str, Json) {
    ("budget", Int(n))
}
